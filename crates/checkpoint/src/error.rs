//! What can go wrong with model files, naming the file, the tensor and the numbers.

use std::io;
use std::path::PathBuf;

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
}
