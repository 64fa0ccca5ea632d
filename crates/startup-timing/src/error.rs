//! What can go wrong with recording, reading and comparing, naming the phase or the file.

use std::path::PathBuf;

use crate::phase::PhaseId;

/// The result of working with timings.
pub type Result<T, E = TimingError> = std::result::Result<T, E>;

/// A refusal of this crate. None of them disturbs the program that is measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TimingError {
    /// A phase that this recording does not have.
    #[error("there is no phase {0} in this recording; it was begun in another one")]
    UnknownPhase(PhaseId),
    /// A phase that was ended before.
    #[error("phase {0} has ended already; end each phase once")]
    Ended(PhaseId),
    /// Something was recorded after the end of the recording.
    #[error("the recording has ended; nothing can be added to it")]
    Closed,
    /// Events that go back in time.
    #[error("an event at {at} ns comes after one at {last} ns")]
    OutOfOrder {
        /// The event's time.
        at: u64,
        /// The time of the event before it.
        last: u64,
    },
    /// A file that cannot be opened, read or written.
    #[error("cannot {act} {}: {source}", path.display())]
    Io {
        /// What was tried.
        act: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// A file that is larger than any report.
    #[error("{what} has {bytes} bytes, and no report has more than {limit}")]
    TooLarge {
        /// The file.
        what: String,
        /// Its size.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// Text that is no report: other JSON, no JSON, or a report that contradicts itself.
    #[error("{what} is not a report of startup timings: {why}")]
    Foreign {
        /// The file, or what was given.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// A report of a schema that a newer version wrote.
    #[error("{what} has schema version {version}; this version reads {known}")]
    Newer {
        /// The file.
        what: String,
        /// Its schema version.
        version: u64,
        /// The newest that is known.
        known: u64,
    },
    /// Nothing to work on.
    #[error("{0}")]
    Nothing(String),
    /// A setting that no call can have.
    #[error("{name} is {value}; {wanted}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// What was given.
        value: String,
        /// What is possible.
        wanted: &'static str,
    },
}
