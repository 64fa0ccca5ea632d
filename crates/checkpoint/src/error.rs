//! What can go wrong with model files, naming the file, the tensor and the numbers.

use std::io;
use std::path::{Path, PathBuf};

use crate::foreign::Foreign;
use crate::gguf::GgufProblem;
use crate::safetensors::HeaderProblem;

/// The result of reading or writing a checkpoint.
pub type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// A refusal or failure of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("cannot {act} {}: {source}", path.display())]
    Io {
        /// What was tried: `open`, `read`, `write`, …
        act: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// The file is something else.
    #[error("{} is {kind}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it is.
        kind: Foreign,
    },
    /// A safetensors file's header is wrong, or does not fit the file.
    #[error("{} cannot be read as safetensors: {problem}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: Box<HeaderProblem>,
    },
    /// What was opened is a folder, a pipe or a device.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The file.
        path: PathBuf,
    },
    /// A GGUF file that is not as the format says.
    #[error("cannot read {} as GGUF: {problem}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: Box<GgufProblem>,
    },
    /// A file was written to, cut or extended after it was opened.
    #[error("{} was changed after it was opened: it had {was} bytes and has {size} now; load it again", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its size when it was opened, in bytes.
        was: u64,
        /// Its size now; equal where only its contents or time changed.
        size: u64,
    },
    /// A file ends before bytes that it had when it was opened.
    #[error(
        "{} ends at byte {end}, inside {what}, which is bytes {offset}..{last}: it was cut after it was opened",
        path.display(),
        last = offset + size
    )]
    Truncated {
        /// The file.
        path: PathBuf,
        /// The tensor, or the part of the file.
        what: String,
        /// Where its bytes begin in the file.
        offset: u64,
        /// How many there are.
        size: u64,
        /// Where the file ends.
        end: u64,
    },
    /// Bytes were asked for that the file did not have when it was opened.
    #[error(
        "bytes {offset}..{end} of {what} are outside {}, which has {size} bytes",
        path.display(),
        end = u128::from(*offset) + u128::from(*asked)
    )]
    OutsideFile {
        /// The file.
        path: PathBuf,
        /// The tensor, or the part of the file.
        what: String,
        /// Where its bytes would begin.
        offset: u64,
        /// How many were asked for.
        asked: u64,
        /// The size of the file, in bytes.
        size: u64,
    },
    /// The operating system failed a read.
    #[error("cannot read {what} at byte {offset} of {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The tensor, or the part of the file.
        what: String,
        /// Where the read began.
        offset: u64,
        /// What the operating system said.
        source: io::Error,
    },
    /// The work was stopped from outside.
    #[error("cancelled")]
    Cancelled,
}

impl CheckpointError {
    /// A GGUF file that is not as the format says.
    pub(crate) fn gguf(path: &Path, problem: GgufProblem) -> Self {
        Self::Gguf { path: path.to_owned(), problem: Box::new(problem) }
    }
}
