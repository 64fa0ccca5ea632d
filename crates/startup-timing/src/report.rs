//! What a recording says in the end, or so far: phases and what is needed to understand them.

use serde::{Deserialize, Serialize};

use crate::analysis::Analysis;
use crate::clock::Clock;
use crate::error::Result;
use crate::phase::Phase;

/// What a report's JSON names itself by.
pub const SCHEMA: &str = "weightstream.startup";
/// The version of the JSON; it rises when a reader of the old one would misunderstand the new one.
pub const SCHEMA_VERSION: u64 = 1;

/// A recording, of one process or of several.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// Whether the recording had ended. If not, the report was taken meanwhile, or the process died.
    pub complete: bool,
    /// How long it took, in nanoseconds; up to the last event if it did not end.
    pub duration: u64,
    /// Its clock.
    pub clock: Clock,
    /// The processes that phases are of: one, or those that were merged.
    pub processes: Vec<ProcessFacts>,
    /// The phases; parents precede children.
    pub phases: Vec<Phase>,
    /// Phases that were not recorded, beyond the limits.
    pub dropped: u64,
    /// Facts about machine and program.
    pub environment: serde_json::Map<String, serde_json::Value>,
    /// What is worth knowing about the recording itself.
    pub notes: Vec<String>,
}

/// A process that was recorded.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcessFacts {
    /// Its number in the system.
    #[serde(default)]
    pub pid: u32,
    /// Its rank among the workers.
    #[serde(default)]
    pub rank: Option<u32>,
    /// What it is called.
    #[serde(default)]
    pub name: String,
    /// The age of the process when its recording started, in nanoseconds.
    #[serde(default)]
    pub age: Option<u64>,
    /// The file it came from, where several were merged.
    #[serde(default)]
    pub file: Option<String>,
    /// What there is of it.
    #[serde(default)]
    pub state: PartState,
    /// Why it is not whole.
    #[serde(default)]
    pub problem: Option<String>,
}

impl ProcessFacts {
    /// How it is named to people: its rank, its name, or its number.
    pub fn label(&self) -> String {
        match (self.rank, self.name.as_str()) {
            (Some(rank), "") => format!("rank {rank}"),
            (Some(rank), name) => format!("rank {rank} {name}"),
            (None, "") if self.pid == 0 => "a process".into(),
            (None, "") => format!("process {}", self.pid),
            (None, name) => name.to_owned(),
        }
    }
}

/// How much there is of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PartState {
    /// Its whole recording.
    #[default]
    Complete,
    /// A recording that did not end: the process runs still, or was killed.
    Partial,
    /// Nothing: there is no such file.
    Missing,
    /// Nothing: the file is no report.
    Unreadable,
}

impl Report {
    /// Exclusive times, gaps and overlaps.
    pub fn analysis(&self) -> Result<Analysis> {
        Analysis::of(self)
    }

    /// The time in synchronization callbacks, in nanoseconds. It is part of durations, or of gaps.
    pub fn synchronization(&self) -> u64 {
        self.phases
            .iter()
            .map(|phase| phase.sync_before.saturating_add(phase.sync_inside))
            .fold(0, u64::saturating_add)
    }
}
