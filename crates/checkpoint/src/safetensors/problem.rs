//! What is wrong with a safetensors header. Each is a sentence about the file, with the tensor and the numbers.

use std::io;

use ::safetensors::Dtype;

use crate::json::Fault;

/// What is wrong with a safetensors file, for [`CheckpointError::Header`](crate::CheckpointError::Header).
///
/// Names from the file are printed escaped: they are text of strangers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum HeaderProblem {
    /// No byte at all.
    #[error("it is empty")]
    Empty,
    /// Shorter than the length of the header.
    #[error("it has {size} bytes, and the length of the header alone takes 8: the file was cut")]
    Short { size: u64 },
    /// A header longer than any may be.
    #[error("it says that its header has {length} bytes, more than the {limit} allowed")]
    TooLong { length: u64, limit: u64 },
    /// A header longer than the file.
    #[error(
        "it says that its header has {length} bytes, but only {there} follow: the file was cut, or is no safetensors file"
    )]
    Cut { length: u64, there: u64 },
    /// A header out of all proportion to the data.
    #[error(
        "its header has {length} bytes for {data} bytes of data, more than {ratio} times as many: it was cut, or made to take memory"
    )]
    OutOfProportion { length: u64, data: u64, ratio: u64 },
    /// A length of zero.
    #[error("it says that its header has no bytes; the smallest header is `{{}}`")]
    NoHeader,
    /// It opens with a mark that JSON does not allow.
    #[error("its header opens with a UTF-8 byte order mark, which JSON does not allow")]
    ByteOrderMark,
    /// It opens with something else than JSON's mark of an object.
    #[error("its header opens with {found:?} at byte {at}, instead of `{{`")]
    Opening { at: u64, found: char },
    /// Something that is no UTF-8.
    #[error("byte {at} of its header is not UTF-8")]
    NotUtf8 { at: u64 },
    /// Something that is no JSON, or not the JSON of a header.
    #[error("byte {at} of its header {what}")]
    Syntax { at: u64, what: &'static str },
    /// Something after the JSON.
    #[error("byte {at} of its header follows the end of the JSON; only spaces may fill a header up")]
    AfterJson { at: u64 },
    /// Zero bytes after the JSON.
    #[error("its header is filled up with zero bytes from byte {at} on; only spaces may fill a header up")]
    ZeroFilled { at: u64 },
    /// Something longer than allowed.
    #[error("by byte {at} its header has more than the {limit} {what} allowed")]
    Limit { at: u64, what: &'static str, limit: u64 },
    /// One name twice.
    #[error("it has two tensors named {tensor:?}")]
    DuplicateTensor { tensor: String },
    /// One metadata key twice.
    #[error("its metadata has the key {key:?} twice")]
    DuplicateKey { key: String },
    /// Two metadata sections.
    #[error("it has two `__metadata__` sections")]
    DuplicateMetadata,
    /// Metadata that is not a section.
    #[error("its `__metadata__` is neither an object nor null")]
    MetadataKind,
    /// Metadata that is not text; among them a tensor of that name.
    #[error(
        "its metadata says something other than text for {key:?}; a tensor cannot be named `__metadata__`"
    )]
    MetadataValue { key: String },
    /// A tensor that is described by something else than an object.
    #[error("tensor {tensor:?} is described by {found} instead of an object")]
    TensorKind { tensor: String, found: &'static str },
    /// One field twice.
    #[error("tensor {tensor:?} has the field `{field}` twice")]
    DuplicateField { tensor: String, field: &'static str },
    /// A field that is not there.
    #[error("tensor {tensor:?} has no field `{field}`")]
    MissingField { tensor: String, field: &'static str },
    /// An element type nobody knows.
    #[error("tensor {tensor:?} is of the unknown type {dtype:?}")]
    Dtype { tensor: String, dtype: String },
    /// A field that is of the wrong kind.
    #[error("tensor {tensor:?} has {found} in its field `{field}`, where {wanted} is due")]
    FieldKind { tensor: String, field: &'static str, found: &'static str, wanted: &'static str },
    /// A number that is negative, broken, or beyond 64 bits.
    #[error(
        "tensor {tensor:?} has {number} in its field `{field}`, where an integer from 0 to 2^64 - 1 is due"
    )]
    Number { tensor: String, field: &'static str, number: String },
    /// A dimension that no tensor can have.
    #[error("tensor {tensor:?} has a dimension of {dimension}, beyond 2^63 - 1")]
    Dimension { tensor: String, dimension: u64 },
    /// Too many dimensions.
    #[error("tensor {tensor:?} has more than {limit} dimensions")]
    Rank { tensor: String, limit: usize },
    /// Not two offsets.
    #[error("tensor {tensor:?} has {} than two `data_offsets`", if *more { "more" } else { "fewer" })]
    OffsetCount { tensor: String, more: bool },
    /// Offsets the wrong way round.
    #[error("tensor {tensor:?} ends at data byte {end}, before its start at {start}")]
    Reversed { tensor: String, start: u64, end: u64 },
    /// A size beyond 64 bits.
    #[error("tensor {tensor:?} of type {dtype} and shape {shape:?} has more than 2^64 - 1 bits")]
    Overflow { tensor: String, dtype: Dtype, shape: Vec<u64> },
    /// Elements that do not fill the last byte.
    #[error(
        "tensor {tensor:?} of type {dtype} and shape {shape:?} has {bits} bits, no whole number of bytes"
    )]
    PartialByte { tensor: String, dtype: Dtype, shape: Vec<u64>, bits: u64 },
    /// Offsets that are not as far apart as the shape says.
    #[error(
        "tensor {tensor:?} of type {dtype} and shape {shape:?} takes {wanted} bytes, but has {found} (data bytes {start} to {end})"
    )]
    Size { tensor: String, dtype: Dtype, shape: Vec<u64>, wanted: u64, found: u64, start: u64, end: u64 },
    /// Data that starts with a gap.
    #[error("the first tensor, {tensor:?}, starts at data byte {start} instead of 0")]
    FirstOffset { tensor: String, start: u64 },
    /// A gap between two tensors.
    #[error(
        "between tensors {before:?} and {tensor:?} lies a gap: the one ends at data byte {end}, the other starts at {start}"
    )]
    Gap { tensor: String, start: u64, before: String, end: u64 },
    /// Two tensors on the same bytes.
    #[error(
        "tensors {before:?} and {tensor:?} overlap: the one ends at data byte {end}, the other starts at {start}"
    )]
    Overlap { tensor: String, start: u64, before: String, end: u64 },
    /// A file that ends too early.
    #[error(
        "it was cut: it has {size} bytes and should have {wanted}; the first tensor that does not fit is {tensor:?}"
    )]
    Truncated { tensor: String, size: u64, wanted: u64 },
    /// A file that ends too late.
    #[error(
        "{bytes} bytes follow its last tensor; the tensors themselves are complete. Open it with allow_trailing to read it all the same"
    )]
    Trailing { bytes: u64 },
    /// Not a problem of the file: its bytes could not be read.
    #[error("its header could not be read: {0}")]
    Unreadable(#[source] io::Error),
}

impl HeaderProblem {
    /// What is wrong with a file that is too short to have a length.
    pub(super) fn of_size(size: u64) -> Self {
        if size == 0 { Self::Empty } else { Self::Short { size } }
    }
}

impl From<Fault> for HeaderProblem {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Io(error) => Self::Unreadable(error),
            Fault::Syntax { at, what } => Self::Syntax { at, what },
            Fault::NotUtf8 { at } => Self::NotUtf8 { at },
            Fault::Limit { at, what, limit } => Self::Limit { at, what, limit },
        }
    }
}
