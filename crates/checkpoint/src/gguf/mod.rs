//! GGUF, versions 2 and 3: what a file says of itself and of its tensors, read with bounds. Tensors stay raw blocks;
//! nothing is dequantized here.
//!
//! ```text
//! "GGUF" | version u32 | tensors u64 | entries u64 |
//! entries: key, type, value …                       | lists may be long: walked, kept only if short
//! tensors: name, rank, dims (fastest first), type, offset …
//! padding to the alignment                          |
//! data: each tensor at a multiple of the alignment, counted from here
//! ```
//!
//! No number in a file is believed before it is compared with what the file can hold, and nothing is allocated from one
//! that was not. Big-endian files and version 1 are refused by name.

mod cursor;
mod entries;
mod header;
mod problem;
mod shape;
mod source;
mod split;
mod tensors;
mod types;
mod value;

pub use header::{GgufHeader, read_header};
pub use problem::GgufProblem;
pub use shape::{ShapeFit, fit_shape};
pub use source::{ByteSource, MemorySource};
pub use split::{Split, check_splits};
pub use types::GgmlType;
pub use value::{Array, Value, ValueType};

/// The first four bytes of every file.
pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
