//! Why tensors cannot be written as asked. Each is a sentence with the tensor and the numbers.

use ::safetensors::Dtype;

use crate::safetensors::HeaderProblem;

/// What is wrong with what was asked, for [`CheckpointError::Unwritable`](crate::CheckpointError::Unwritable).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each message says what its fields are")]
pub enum WriteProblem {
    /// One name twice.
    #[error("two tensors are named {tensor:?}")]
    DuplicateTensor { tensor: String },
    /// A name that the format keeps for itself.
    #[error("a tensor cannot be named `__metadata__`")]
    ReservedName,
    /// A size beyond any file.
    #[error("tensor {tensor:?} of type {dtype} and shape {shape:?} has more than 2^63 - 1 bytes")]
    Overflow { tensor: String, dtype: Dtype, shape: Vec<u64> },
    /// Elements that do not fill the last byte.
    #[error(
        "tensor {tensor:?} of type {dtype} and shape {shape:?} has {bits} bits, no whole number of bytes"
    )]
    PartialByte { tensor: String, dtype: Dtype, shape: Vec<u64>, bits: u64 },
    /// More tensors than a file can hold together.
    #[error("all tensors together have more than 2^63 - 1 bytes")]
    TotalOverflow,
    /// A header longer than readers accept.
    #[error("the header would have {bytes} bytes, more than the {limit} that readers accept")]
    HeaderTooLong { bytes: u64, limit: u64 },
    /// A header that this library would not read with its default limits.
    #[error("it could not be read again with the default limits: {0}")]
    NotReadable(#[source] HeaderProblem),
    /// An alignment that is none.
    #[error("an alignment of {alignment} bytes is no power of two from 1 to {limit}")]
    Alignment { alignment: u64, limit: u64 },
    /// A tensor that was not announced.
    #[error("there is no tensor {index}: {count} were announced")]
    NoTensor { index: usize, count: usize },
    /// More bytes than a tensor has.
    #[error("tensor {tensor:?} has {bytes} bytes, and {given} were given")]
    TooManyBytes { tensor: String, bytes: u64, given: u64 },
    /// Fewer bytes than a tensor has.
    #[error("tensor {tensor:?} has {bytes} bytes, and only {given} were given before the end")]
    TooFewBytes { tensor: String, bytes: u64, given: u64 },
}
