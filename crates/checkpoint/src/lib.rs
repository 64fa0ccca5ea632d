#![doc = include_str!("../README.md")]

mod error;
mod foreign;
pub mod gguf;
pub mod io;
mod json;
mod limits;
mod mapping;
pub mod safetensors;
mod tensor;

pub use error::{CheckpointError, Result};
pub use foreign::Foreign;
pub use io::{Cancel, OpenFile};
pub use limits::Limits;
pub use mapping::{FileMap, FileSpan, file_span};
pub use tensor::{FileHeader, TensorInfo, TensorType};
