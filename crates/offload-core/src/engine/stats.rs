//! What the engine has done, in numbers.
#![forbid(unsafe_code)]

use std::time::Duration;

use pinned_pool::StagingReport;
use serde::Serialize;

/// Counts since the engine was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct EngineStats {
    /// Steps begun.
    pub steps: u64,
    /// Units entered, resident ones included, entries within themselves not.
    pub visits: u64,
    /// Units copied.
    pub copies: u64,
    /// Bytes of those copies.
    pub copied_bytes: u64,
    /// Copies of units that were entered before they had been copied ahead.
    pub fetched_on_demand: u64,
    /// Stream waits enqueued, of either stream for the other.
    pub waits: u64,
    /// Bytes copied to pages of their own.
    pub uploaded_bytes: u64,
    /// Bytes given to the staging ring, uploads included.
    pub staged_bytes: u64,
    /// Times the host waited for a unit's bytes to be read into the staging ring.
    pub host_waits: u64,
    /// Plans put in place after the first.
    pub replans: u64,
    /// Times the model came to the device, among others that share it.
    pub arrivals: u64,
    /// Times a step began by waiting for all work, because the one before it did not end well.
    pub recoveries: u64,
    /// Nanoseconds of host time spent in entering and leaving units.
    pub host_nanoseconds: u64,
}

impl EngineStats {
    pub(super) fn spent(&mut self, time: Duration) {
        self.host_nanoseconds += u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
    }
}

/// A unit of the current plan.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct UnitReport {
    /// Its name.
    pub name: String,
    /// All of its bytes on the address line.
    pub bytes: u64,
    /// Those that are copied before it is used.
    pub streamed_bytes: u64,
    /// In how many pieces they are copied.
    pub pieces: u64,
    /// How often it was copied since this plan was put in place.
    pub copies: u64,
}

/// The staging ring of the engine's device, which it shares with others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StagingStats {
    /// Bytes of it that are page-locked: all or none.
    pub locked_bytes: u64,
    /// Bytes of one chunk.
    pub chunk_bytes: u64,
    /// How many chunks there are.
    pub chunks: u32,
    /// Threads that read.
    pub threads: usize,
    /// Whether files are read around the page cache, which could not hold them.
    pub around_cache: bool,
    /// What was refused when the ring was made, and what was done instead.
    pub step_down: Option<String>,
}

impl From<StagingReport> for StagingStats {
    fn from(report: StagingReport) -> Self {
        Self {
            locked_bytes: report.locked.0,
            chunk_bytes: report.chunk.0,
            chunks: report.chunks,
            threads: report.threads,
            around_cache: report.around_cache,
            step_down: report.step_down,
        }
    }
}

/// A moment's view of an [`Engine`](crate::Engine).
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EngineReport {
    /// What was done so far.
    pub stats: EngineStats,
    /// The units, by [`UnitId`](crate::UnitId).
    pub units: Vec<UnitReport>,
    /// The units a step is expected to visit, as learned.
    pub order: Vec<u32>,
    /// The most units copied ahead of the one computed.
    pub look_ahead: u32,
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Pages that are resident.
    pub own_pages: u32,
    /// Pages of the transit ring.
    pub ring_pages: u32,
    /// The most bytes of pages allowed.
    pub page_limit_bytes: u64,
    /// Bytes of pages held now, by all users of the page pool.
    pub page_bytes_in_use: u64,
    /// The most bytes of pages that were ever held at once.
    pub page_bytes_peak: u64,
    /// Whether the model is on the device: false while other models have its pages.
    pub is_here: bool,
    /// Whether a replan failed half way and is completed at the next step.
    pub replan_pending: bool,
    /// Whether a call failed and the next step starts over.
    pub recovery_pending: bool,
    /// The staging ring, if any of the model's bytes are not page-locked.
    pub staging: Option<StagingStats>,
}
