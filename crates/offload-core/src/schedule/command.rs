//! What the schedule asks its executor to do, in order.
#![forbid(unsafe_code)]

use crate::model::UnitId;

/// One thing to enqueue. Commands are executed in the order given; none of them makes the host wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Command {
    /// Copy stream: wait for the latest recorded last use of the unit.
    WaitLastUse(UnitId),
    /// Copy stream, only when [`announce_evictions`](crate::Schedule::announce_evictions) is on: the unit's bytes
    /// are about to be overwritten, and its uses have been waited for.
    Evict(UnitId),
    /// Copy stream: copy the unit's streamed bytes to its addresses.
    Copy(UnitId),
    /// Copy stream: record that the unit's copy is done.
    RecordCopied(UnitId),
    /// Compute stream: wait for the unit's latest copy.
    WaitCopied(UnitId),
    /// Compute stream: record that the unit's use is over.
    RecordLastUse(UnitId),
}
