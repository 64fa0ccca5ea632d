#![doc = include_str!("../README.md")]

mod error;
mod limits;
mod tensor;

pub use error::{CheckpointError, Result};
pub use limits::Limits;
pub use tensor::{FileHeader, TensorInfo, TensorType};
