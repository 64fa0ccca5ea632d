//! What a recording consists of: the lines of its file, and what the record is made from.

use serde::{Deserialize, Serialize};

use crate::phase::{Amounts, Levels, PhaseId, Status};

/// One event of a recording. Times are nanoseconds from its start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A phase begins.
    Begin {
        /// Its number: one more than the last.
        id: PhaseId,
        /// The phase it is begun in.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<PhaseId>,
        /// Its name.
        name: String,
        /// When.
        at: u64,
        /// The thread.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        thread: String,
        /// Nanoseconds of synchronization before it.
        #[serde(default, skip_serializing_if = "is_zero")]
        sync: u64,
    },
    /// A phase ends.
    End {
        /// Which.
        id: PhaseId,
        /// When.
        at: u64,
        /// How.
        status: Status,
        /// The type of its error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// What happened in it.
        #[serde(default, skip_serializing_if = "Amounts::is_empty")]
        counters: Amounts,
        /// What was there before and after.
        #[serde(default, skip_serializing_if = "Levels::is_empty")]
        levels: Levels,
        /// Nanoseconds of synchronization at its end.
        #[serde(default, skip_serializing_if = "is_zero")]
        sync: u64,
    },
    /// Facts about the machine and the program, by name; later ones replace earlier ones.
    Environment {
        /// The facts.
        facts: serde_json::Map<String, serde_json::Value>,
    },
    /// Something worth knowing about the recording itself.
    Note {
        /// What.
        text: String,
    },
    /// The recording ends.
    Close {
        /// When.
        at: u64,
        /// Phases that were not recorded, beyond the limits.
        #[serde(default, skip_serializing_if = "is_zero")]
        dropped: u64,
    },
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}
