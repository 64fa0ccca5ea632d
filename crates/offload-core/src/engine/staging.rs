//! Units whose bytes are not all page-locked: their copies are jobs of the device's staging ring.
//!
//! ```text
//!   leave(u)     last use of u recorded; jobs of the units ahead are given to the ring
//!   threads      read chunks ahead of their copies, while the device computes
//!   enter(v)     the host waits until v's job is on the copy stream, then tells the compute stream to wait for it
//! ```
//!
//! Until a job has been submitted, its `copied` event still means the copy before it; so a compute stream is told to wait
//! only once the host has seen the job submitted. Units that are page-locked as a whole go to the stream at once, as they
//! do where there is no ring, unless jobs before them are not submitted yet: the stream keeps the schedule's order.
//!
//! **No deadlock.** The host waits for the ring's threads, which take no lock of the engine and wait for two things: reads,
//! and marks behind copies that are on the stream. Those copies wait for last uses that were recorded before their job was
//! given; what was recorded was submitted, and waits in turn for copies submitted earlier still. So every wait is for
//! something older, and none is for what the host has yet to do.
//!
//! **An event is not recorded again while a job waits to wait for it.** A unit's last use is recorded again only after it
//! was entered again, hence copied again, by a job behind the one that waits.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::Bytes;
use pinned_pool::{
    Event, FileBytes, LineRun, StagedCopy, StagedJob, StagedStep, StagingLine, StagingOptions, StagingReport,
    Ticket, TransferStream,
};
use vmm_alloc::AddressSpace;

use super::error::Result;
use super::source::Source;
use super::stats::EngineStats;
use crate::model::UnitId;

/// An engine's part of the staging ring.
#[derive(Debug)]
pub(super) struct Staging {
    line: StagingLine,
    /// What the next job begins with.
    before: Vec<StagedStep>,
    /// What it copies.
    copy: Option<Arc<StagedCopy>>,
    /// Jobs that may not be submitted yet, by unit.
    tickets: Vec<Option<Ticket>>,
    /// The copy of each unit; `None` if the unit is resident.
    copies: Vec<Option<Arc<StagedCopy>>>,
}

impl Staging {
    /// Joins the ring, if any of the model's bytes are not page-locked.
    pub(super) fn join(
        source: &dyn Source,
        line: Bytes,
        stream: &Arc<TransferStream>,
        options: &StagingOptions,
    ) -> Result<Option<Self>> {
        let mut any = false;
        let mut in_files = Bytes::ZERO;
        for part in source.parts(&(0..line.0)) {
            if let LineRun::Staged { bytes, .. } = part.run {
                any = true;
                in_files = in_files + bytes.file().map_or(Bytes::ZERO, FileBytes::size);
            }
        }
        if !any {
            return Ok(None);
        }
        let line = StagingLine::new(stream, options, in_files)?;
        let (before, copies) = (Vec::new(), Vec::new());
        Ok(Some(Self { line, before, copy: None, tickets: Vec::new(), copies }))
    }

    /// Works out a copy.
    pub(super) fn prepare(&self, space: &Arc<AddressSpace>, runs: &[LineRun]) -> Result<Arc<StagedCopy>> {
        Ok(self.line.prepare(space, runs)?)
    }

    /// Takes the copies of a plan's units. Nothing is under way.
    pub(super) fn take(&mut self, copies: Vec<Option<Arc<StagedCopy>>>) {
        self.tickets.clear();
        self.tickets.resize(copies.len(), None);
        self.copies = copies;
    }

    /// The copy of a unit.
    pub(super) fn copy_of(&self, unit: usize) -> Option<&Arc<StagedCopy>> {
        self.copies.get(unit).and_then(Option::as_ref)
    }

    /// The next job begins with this.
    pub(super) fn begin_with(&mut self, step: StagedStep) {
        self.before.push(step);
    }

    /// The next job copies this unit.
    pub(super) fn set_copy(&mut self, unit: UnitId) -> Option<&Arc<StagedCopy>> {
        self.copy = self.copy_of(unit.0 as usize).cloned();
        self.copy.as_ref()
    }

    /// Gives the job that was put together to the ring, or what is page-locked to the stream if it is next there.
    pub(super) fn submit(
        &mut self,
        unit: UnitId,
        copied: &Arc<Event>,
        stream: &TransferStream,
        stats: &mut EngineStats,
    ) -> Result<()> {
        let (before, copy) = (std::mem::take(&mut self.before), self.copy.take());
        let staged = copy.as_ref().map_or(Bytes::ZERO, |copy| copy.staged_bytes());
        stats.staged_bytes += staged.0;
        let ticket = if staged == Bytes::ZERO && self.line.is_open() {
            for step in &before {
                step.submit(stream)?;
            }
            if let Some(locked) = copy.as_ref().and_then(|copy| copy.locked()) {
                stream.enqueue(locked)?;
            }
            stream.record(copied)?;
            None
        } else {
            Some(self.line.submit(StagedJob { before, copy, copied: Some(Arc::clone(copied)) })?)
        };
        if let Some(kept) = self.tickets.get_mut(unit.0 as usize) {
            *kept = ticket;
        }
        Ok(())
    }

    /// Copies something outside any unit. Blocks until it is submitted.
    pub(super) fn upload(&mut self, copies: Vec<Arc<StagedCopy>>, stats: &mut EngineStats) -> Result<()> {
        let mut tickets = Vec::with_capacity(copies.len());
        for copy in copies {
            stats.staged_bytes += copy.staged_bytes().0;
            tickets.push(self.line.submit(StagedJob { copy: Some(copy), ..StagedJob::default() })?);
        }
        for ticket in tickets {
            self.line.wait_submitted(ticket)?;
        }
        Ok(())
    }

    /// Blocks until a unit's latest job is submitted.
    pub(super) fn wait_submitted(&mut self, unit: UnitId, stats: &mut EngineStats) -> Result<()> {
        if let Some(ticket) = self.tickets.get_mut(unit.0 as usize).and_then(Option::take) {
            stats.host_waits += u64::from(self.line.wait_submitted(ticket)?);
        }
        Ok(())
    }

    /// Submits what was put together so far, and blocks until all jobs are submitted. An error if its waits were not, or
    /// others before them.
    pub(super) fn flush(&mut self) -> Result<()> {
        let before = std::mem::take(&mut self.before);
        let ticket = self.line.submit(StagedJob { before, ..StagedJob::default() })?;
        self.line.wait_submitted(ticket)?;
        Ok(())
    }

    /// Forgets all jobs that are not submitted. Blocks until no thread is at work for this engine.
    pub(super) fn cancel(&mut self) -> Result<()> {
        self.before.clear();
        self.copy = None;
        self.tickets.fill(None);
        Ok(self.line.cancel()?)
    }

    /// Whether everything given was submitted.
    pub(super) fn is_clear(&self) -> bool {
        self.line.is_clear()
    }

    /// Leaves the ring. Blocks.
    pub(super) fn close(&mut self) -> Result<()> {
        self.take(Vec::new());
        Ok(self.line.close()?)
    }

    pub(super) fn report(&self) -> StagingReport {
        self.line.report()
    }
}
