//! What a file says of its tensors: names, element types, shapes, and where their bytes lie.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use ::safetensors::Dtype;

use crate::gguf::GgmlType;

/// How a tensor's elements are stored. Prints as the file format spells it: `BF16`, `Q4_K`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorType {
    /// Elements one by one, of a safetensors type.
    Plain(Dtype),
    /// Quantized blocks of ggml.
    Ggml(GgmlType),
}

impl TensorType {
    /// Bytes that the start of a tensor's memory must be a multiple of, for its elements to be read as such. 1 for types
    /// below a byte and for packed blocks, which are read byte by byte.
    pub fn alignment(self) -> u64 {
        match self {
            Self::Plain(dtype) => (dtype.bitsize() as u64 / 8).max(1),
            Self::Ggml(_) => 1,
        }
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plain(dtype) => write!(f, "{dtype}"),
            Self::Ggml(kind) => write!(f, "{kind}"),
        }
    }
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name: data, never a path.
    pub name: String,
    /// How its elements are stored.
    pub kind: TensorType,
    /// Its dimensions, slowest first. Empty for a scalar.
    pub shape: Vec<u64>,
    /// Which file of the checkpoint holds it.
    pub file: usize,
    /// Its bytes in that file, from the file's start. Inside the file: checked when it was opened.
    pub range: Range<u64>,
}

impl TensorInfo {
    /// Its size in the file, in bytes.
    pub fn bytes(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// Whether its bytes start at a multiple of its element size in the file. The safetensors format does not promise
    /// that; a tensor that is not aligned has to be copied before its elements can be read.
    pub fn is_aligned(&self) -> bool {
        self.range.start.is_multiple_of(self.kind.alignment())
    }
}

/// What one file says it holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FileHeader {
    /// Its tensors, in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
    /// Free text that the writer left, by key.
    pub metadata: BTreeMap<String, String>,
    /// Where the first tensor's bytes may start, from the file's start.
    pub data_start: u64,
    /// Bytes after the last tensor that belong to none.
    pub trailing: u64,
}
