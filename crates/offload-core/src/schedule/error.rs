//! What the schedule refuses.
#![forbid(unsafe_code)]

use crate::model::UnitId;

/// A visit that cannot be served. The schedule is unchanged by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// The unit is not one of the plan's.
    #[error("unit {} is not one of the plan's {units} units", unit.0)]
    UnknownUnit {
        /// The unit.
        unit: UnitId,
        /// How many there are.
        units: u32,
    },
    /// The unit's bytes would overwrite those of a unit in use.
    #[error(
        "unit {} cannot be copied while unit {} is open: they share ring memory; leave that unit first or raise the budget",
        unit.0, open.0
    )]
    Conflict {
        /// The unit that was entered.
        unit: UnitId,
        /// The unit that is in use.
        open: UnitId,
    },
    /// The unit was left more often than it was entered.
    #[error("unit {} was left but is not open", unit.0)]
    NotOpen {
        /// The unit.
        unit: UnitId,
    },
    /// The unit was released more often than it was held.
    #[error("unit {} was released but is not held", unit.0)]
    NotHeld {
        /// The unit.
        unit: UnitId,
    },
}
