//! One phase of a start, as it is recorded and as it is read.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The number of a phase in its recording, from 1 in the order of beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PhaseId(pub u64);

impl PhaseId {
    /// Its place in a list of phases.
    pub(crate) fn index(self) -> Option<usize> {
        usize::try_from(self.0.checked_sub(1)?).ok()
    }

    pub(crate) fn at(index: usize) -> Self {
        Self(index as u64 + 1)
    }
}

impl fmt::Display for PhaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What became of a phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// It has not ended: the report was taken inside it, or the process died in it.
    Open,
    /// It ended well.
    Success,
    /// It ended with an error.
    Error,
}

/// What happened during a phase, in the whole process, by name: bytes read, page faults, … `None` is not known.
pub type Amounts = BTreeMap<String, Option<i64>>;

/// What was there at the beginning and at the end of a phase, by name: memory in use. `None` is not known.
pub type Levels = BTreeMap<String, (Option<i64>, Option<i64>)>;

/// One phase. Times are nanoseconds from the start of the recording.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phase {
    /// Its number.
    pub id: PhaseId,
    /// The phase that contains it.
    pub parent: Option<PhaseId>,
    /// The phase that it was begun in, where that ended first and it was moved up to contain it no more.
    pub outlived: Option<PhaseId>,
    /// What it is called.
    pub name: String,
    /// When it began.
    pub start: u64,
    /// How long it took, with all it contains; up to now if it is open.
    pub duration: u64,
    /// What became of it.
    pub status: Status,
    /// The type of the error that ended it.
    pub error_type: Option<String>,
    /// The thread that began it.
    pub thread: String,
    /// The process it ran in, as an index into the report's processes.
    pub process: usize,
    /// What happened meanwhile.
    pub counters: Amounts,
    /// What was there before and after.
    pub levels: Levels,
    /// Nanoseconds in the synchronization callback just before it began; they are its parent's.
    pub sync_before: u64,
    /// Nanoseconds in the synchronization callback at its end; they are part of its duration.
    pub sync_inside: u64,
}

impl Phase {
    /// When it ended.
    pub fn end(&self) -> u64 {
        self.start.saturating_add(self.duration)
    }
}
