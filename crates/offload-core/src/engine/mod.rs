//! Executes the schedule's commands on a device, through the safe types of vmm-alloc and pinned-pool.
//!
//! It maps a plan's pages, uploads what is resident, enqueues waits, copies and records around each use of a unit,
//! and replaces the plan between steps. It decides nothing about what streams (the plan) or when (the schedule).
//!
//! **Invariants.** A compute stream is told to wait for a unit's copy before anything uses the unit. Pages are mapped
//! and unmapped only when all work has been waited for. No call of a step makes the host wait for the device; entering a
//! unit waits until its bytes have been read, if they are not page-locked (`staging.rs`). An error leaves an engine whose
//! next step is right.

mod budget;
mod core;
mod device;
mod error;
mod hold;
mod memory;
mod presence;
mod replan;
mod shared;
mod source;
mod staged;
mod staging;
mod state;
mod stats;
mod timing;

pub use core::{Engine, EngineDesc, EngineOptions};
pub use error::EngineError;
pub use shared::SharedPages;
pub use source::{Source, SourcePart, StoreSource};
pub use stats::{EngineReport, EngineStats, StagingStats, UnitReport};
pub use timing::{CopyTrace, StepTimes, StepTrace, VisitTrace};

#[cfg(test)]
mod tests;
