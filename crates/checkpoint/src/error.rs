//! What can go wrong with model files, naming the file, the tensor and the numbers.

use std::io;
use std::path::{Path, PathBuf};

use crate::foreign::Foreign;
use crate::gguf::GgufProblem;
use crate::index::IndexProblem;
use crate::safetensors::HeaderProblem;
use crate::writer::WriteProblem;

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
    /// The index of a sharded model is wrong, or does not fit the files.
    #[error("the index {} cannot be used: {problem}", path.display())]
    Index {
        /// The index.
        path: PathBuf,
        /// What is wrong.
        problem: Box<IndexProblem>,
    },
    /// Shards of a model that are not there.
    #[error("{} is one of {count} shards, of which {} are missing: {}", path.display(), missing.len(), some(missing))]
    MissingShards {
        /// The shard that was opened.
        path: PathBuf,
        /// How many there should be.
        count: usize,
        /// The names of those that are not there.
        missing: Vec<String>,
    },
    /// One number for two shards.
    #[error("{} and {} are both shard {number}; remove one", first.display(), second.display())]
    SameShard {
        /// The number.
        number: usize,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A shard whose number is beyond their count.
    #[error("{} is no shard of {count}, by its number", path.display())]
    ShardNumber {
        /// The file.
        path: PathBuf,
        /// How many there should be.
        count: usize,
    },
    /// Too many files for one model.
    #[error("{} belongs to a model of more than the {limit} files allowed", path.display())]
    TooManyFiles {
        /// The file at which they were too many.
        path: PathBuf,
        /// How many are allowed.
        limit: usize,
    },
    /// A name that two files of a model have.
    #[error("{} and {} both hold a tensor named {tensor:?}", first.display(), second.display())]
    DuplicateTensor {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other.
        second: PathBuf,
    },
    /// A folder without a model.
    #[error("{} holds no .safetensors and no .gguf file", path.display())]
    NoModel {
        /// The folder.
        path: PathBuf,
    },
    /// A folder with several models.
    #[error("{} holds several models; open one of them by name: {}", path.display(), some(candidates))]
    Ambiguous {
        /// The folder.
        path: PathBuf,
        /// The files that one could mean.
        candidates: Vec<String>,
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
    /// An entry of a model's metadata that is not what its name says.
    #[error("the metadata entry {key:?} holds no JSON of its kind: {why}")]
    Metadata {
        /// The entry.
        key: String,
        /// What is wrong with it.
        why: String,
    },
    /// Tensors that cannot be written as asked.
    #[error("cannot write {}: {problem}", path.display())]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What is wrong with what was asked.
        problem: Box<WriteProblem>,
    },
    /// The disk, a quota or a limit has no room for a file. What was there before is there still.
    #[error("no room for the {needed} bytes of {}{}: {source}", path.display(), room(*free))]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Bytes of the whole file.
        needed: u64,
        /// Bytes free on its file system, if it tells.
        free: Option<u64>,
        /// What the operating system said.
        source: io::Error,
    },
    /// A file was written to, cut or extended after it was opened.
    #[error("{} was changed after it was opened: {}", path.display(), how_changed(*was, *size, *written))]
    Changed {
        /// The file.
        path: PathBuf,
        /// Its size when it was opened, in bytes.
        was: u64,
        /// Its size now; equal where only its contents or time changed.
        size: u64,
        /// The time of its last write when it was opened, in seconds and nanoseconds.
        written: (i64, i64),
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

/// Names in a message: the first few of them.
pub(crate) fn some(names: &[String]) -> String {
    const SHOWN: usize = 16;
    let shown = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect::<Vec<_>>().join(", ");
    match names.len().checked_sub(SHOWN) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}

/// How much room there is, for the middle of a sentence.
fn room(free: Option<u64>) -> String {
    free.map_or(String::new(), |free| format!(" ({free} bytes are free there)"))
}

/// What is seen of a change: of one that keeps the size, only the time of the last write.
fn how_changed(was: u64, size: u64, (seconds, nanoseconds): (i64, i64)) -> String {
    if was == size {
        return format!(
            "it was written to or touched, and still has {size} bytes, which may be others; load it again, or, if only its time was \
             changed, give it back: touch -d @{seconds}.{nanoseconds:09}"
        );
    }
    format!("it had {was} bytes and has {size} now; load it again")
}
