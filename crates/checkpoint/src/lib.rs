#![doc = include_str!("../README.md")]

mod checkpoint;
mod error;
mod folder;
mod foreign;
pub mod gguf;
mod index;
pub mod io;
mod json;
mod limits;
mod mapping;
mod metadata;
pub mod safetensors;
mod shards;
mod tensor;
mod writer;

pub use checkpoint::{Checkpoint, OpenOptions};
pub use error::{CheckpointError, Result};
pub use foreign::Foreign;
pub use index::{IndexProblem, ShardIndex, read_index};
pub use io::{Cancel, IoChoice, IoMode, OpenFile, ReadJob, ReadOptions, ReadReport, read};
pub use limits::Limits;
pub use mapping::{FileMap, FileSpan, file_span};
pub use metadata::ModelMetadata;
pub use tensor::{FileHeader, TensorInfo, TensorType};
pub use writer::{Order, Progress, TensorOut, TensorSpec, WriteOptions, WriteProblem, Writer, write};
