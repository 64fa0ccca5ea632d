//! What can go wrong with a folder of records, and what comes along with a record that could be read.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// The result of an operation on a store.
pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// A write that did not happen. The record is as it was before, unless the text says otherwise.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// There is no home folder to put profiles in.
    #[error("there is no home folder for .ddo/profiles; set DDO_PROFILE_DIR")]
    NoHome,
    /// Another process holds the folder's lock, and went on holding it.
    #[error("the lock of {} was held by another process for {waited:?}; nothing was written", folder.display())]
    Locked {
        /// The folder.
        folder: PathBuf,
        /// How long was waited.
        waited: Duration,
    },
    /// The operating system refused.
    #[error("cannot {act} in {}: {source}", folder.display())]
    Io {
        /// What was tried.
        act: &'static str,
        /// The folder.
        folder: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The file is of a newer version whose shape is not known here.
    #[error("{file} is of the newer version {version} and cannot be merged; it was left as it is")]
    Newer {
        /// The file's name.
        file: String,
        /// Its version.
        version: u64,
    },
    /// An identity or an entry that no record may have.
    #[error("{what}: {reason}")]
    Refused {
        /// What was refused.
        what: String,
        /// Why.
        reason: String,
    },
    /// The record would be larger than what is read again.
    #[error("the record would be {bytes} bytes and may be {limit}; remove entries first")]
    TooLarge {
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
}

/// Something wrong that did not stop the caller: what, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// What it is about.
    pub about: About,
    /// What is wrong, in one line.
    pub reason: String,
}

/// What a [`Notice`] is about.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum About {
    /// The whole file, which counts as missing; `moved_to` is where it was set aside, if it was.
    File {
        /// The name under which the file can be found now.
        moved_to: Option<String>,
    },
    /// One entry or field, which counts as missing.
    Entry {
        /// Its name.
        name: String,
    },
    /// The file's version is newer than this reader's; what is understood of it was read.
    Version {
        /// The file's version.
        version: u64,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.about {
            About::File { moved_to: Some(name) } => {
                write!(f, "the file was set aside as {name}: {}", self.reason)
            }
            About::File { moved_to: None } => write!(f, "the file was not read: {}", self.reason),
            About::Entry { name } => write!(f, "{name} was not read: {}", self.reason),
            About::Version { version } => write!(f, "the file has version {version}: {}", self.reason),
        }
    }
}
