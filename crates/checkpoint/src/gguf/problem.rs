//! What is wrong with a GGUF file. Each is a sentence about the file, with the tensor or key and the numbers.

/// What is wrong with a GGUF file, for [`CheckpointError::Gguf`](crate::CheckpointError::Gguf).
///
/// Names from the file are printed escaped: they are text of strangers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum GgufProblem {
    /// No byte at all.
    #[error("it is empty")]
    Empty,
    /// Something else at the start.
    #[error("it starts with `{found}`, and a GGUF file starts with `GGUF`")]
    NotGguf { found: String },
    /// One of the formats that came before.
    #[error("it starts with `{found}`, of a format older than GGUF; convert the model again")]
    Older { found: String },
    /// Written for machines of the other byte order.
    #[error(
        "it is big-endian (version {version}), and only little-endian files are read; gguf-convert-endian of the gguf package converts it"
    )]
    BigEndian { version: u32 },
    /// A version that is not read.
    #[error("it is of GGUF version {version}, and versions 2 and 3 are read; convert the model again")]
    Version { version: u32 },
    /// The file ends inside its header.
    #[error(
        "it was cut inside {place}: {wanted} bytes are due from byte {offset} on, and the file has {size} bytes"
    )]
    TruncatedHeader { place: String, offset: u64, wanted: u64, size: u64 },
    /// The file ends before its last tensor does.
    #[error(
        "it was cut: it has {size} bytes, and tensor {tensor:?} is bytes {start} to {end}; it is the first that does not fit"
    )]
    TruncatedData { tensor: String, start: u64, end: u64, size: u64 },
    /// Bytes that belong to nothing.
    #[error(
        "{bytes} bytes follow its last tensor; the tensors themselves are complete. Open it with allow_trailing to read it all the same"
    )]
    Trailing { bytes: u64 },
    /// More of something than the rest of the file can hold.
    #[error("it says that it has {count} {what}; the {left} bytes that follow have room for {room} at most")]
    Count { what: String, count: u64, left: u64, room: u64 },
    /// More than the limits allow.
    #[error("{place} has {value} {what}, more than the {limit} allowed")]
    Limit { place: String, what: &'static str, value: u64, limit: u64 },
    /// A value of a type that GGUF does not have.
    #[error("the value of {key:?} is of the unknown type {number}")]
    ValueType { key: String, number: u32 },
    /// A Boolean that is neither.
    #[error("the value of {key:?} is a Boolean stored as {value}; 0 and 1 are the two there are")]
    Boolean { key: String, value: u8 },
    /// A name or key that is not text.
    #[error("{place} is not UTF-8")]
    NotUtf8 { place: String },
    /// One key twice.
    #[error("its metadata has the key {key:?} twice")]
    DuplicateKey { key: String },
    /// One name twice.
    #[error("it has two tensors named {tensor:?}")]
    DuplicateTensor { tensor: String },
    /// A value of no use for its key.
    #[error("the value of {key:?} is {found}, where {wanted} is due")]
    BadValue { key: String, found: String, wanted: &'static str },
    /// An element type nobody knows, or nobody knows any more.
    #[error("tensor {tensor:?} is of the unknown type {number}{once}")]
    TensorType { tensor: String, number: u32, once: String },
    /// Rows that are not whole blocks.
    #[error("tensor {tensor:?} has rows of {columns} elements, no whole number of {kind} blocks of {block}")]
    Rows { tensor: String, columns: u64, kind: &'static str, block: u64 },
    /// A size beyond any file.
    #[error(
        "tensor {tensor:?} of type {kind} and dimensions {dims:?} (fastest first) has more than 2^63 - 1 bytes"
    )]
    Overflow { tensor: String, kind: &'static str, dims: Vec<u64> },
    /// Data where the alignment does not allow it.
    #[error(
        "tensor {tensor:?} starts at data byte {offset}, no multiple of the file's alignment of {alignment}"
    )]
    Misaligned { tensor: String, offset: u64, alignment: u64 },
    /// Two tensors on the same bytes.
    #[error(
        "tensors {before:?} and {tensor:?} overlap: the one ends at byte {end}, the other starts at {start}"
    )]
    Overlap { before: String, tensor: String, end: u64, start: u64 },
    /// A true shape with another number of elements.
    #[error(
        "its metadata gives tensor {tensor:?} the shape {wanted:?}, but {elements} elements are stored, as {stored:?}"
    )]
    OriginalShape { tensor: String, wanted: Vec<u64>, stored: Vec<u64>, elements: u64 },
    /// Files that are no complete split model.
    #[error("{what}")]
    Split { what: String },
}
