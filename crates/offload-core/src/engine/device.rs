//! The streams and events that commands are executed with.
//!
//! ```text
//!   copy stream      wait(last use of v) ─ copy u ─ record(copied u)
//!   compute stream                            hold(copied u) ─ kernels ─ record(last use u)
//! ```
//!
//! The compute stream may change from call to call. A stream that takes over waits for the one before it, so that
//! all compute streams are one queue to the schedule. Nothing here makes the host wait, except what says so.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::{Access, Bytes, Driver, StreamHandle};
use pinned_pool::{Event, LineRun, PreparedCopy, StagedCopy, StagingOptions, StagingReport, TransferStream};

use vmm_alloc::AddressSpace;

use super::error::{EngineError, Result};
use super::memory::Memory;
use super::source::Source;
use super::staging::Staging;
use super::stats::EngineStats;
use super::timing::CopyTimers;
use crate::model::UnitId;
use crate::plan::Plan;
use crate::schedule::Command;

/// What a missing wait reads instead of a weight: a NaN in every floating-point format.
pub(super) const POISON: u8 = 0xFF;

#[derive(Debug)]
pub(super) struct UnitEvents {
    pub(super) copied: Arc<Event>,
    pub(super) last_use: Arc<Event>,
}

/// A copy, worked out once.
#[derive(Debug)]
pub(super) enum Copied {
    /// Of page-locked bytes.
    Locked(Arc<PreparedCopy>),
    /// Through the staging ring, at least in part.
    Staged(Arc<StagedCopy>),
}

impl Copied {
    pub(super) fn bytes(&self) -> Bytes {
        match self {
            Self::Locked(copy) => copy.bytes(),
            Self::Staged(copy) => copy.bytes(),
        }
    }
}

/// A copy stream, two events a unit, and the compute stream of the moment.
#[derive(Debug)]
#[cfg_attr(test, expect(clippy::struct_excessive_bools, reason = "one of them is a mutant's"))]
pub(super) struct Device {
    driver: Arc<dyn Driver>,
    copies: Arc<TransferStream>,
    /// If any of the model's bytes are not page-locked; all copies are there then.
    staging: Option<Staging>,
    events: Vec<UnitEvents>,
    /// The copy of each unit; `None` if the unit is resident.
    prepared: Vec<Option<Arc<PreparedCopy>>>,
    /// How often each of them was enqueued.
    enqueued: Vec<u64>,
    /// Those of a step that is traced.
    pub(super) timers: CopyTimers,
    /// The end of all computation so far, unless there was some `since_mark`.
    mark: Event,
    since_mark: bool,
    compute: Option<StreamHandle>,
    pub(super) poison: bool,
    pub(super) guard: bool,
    /// A mistake made on purpose: nobody waits for reads.
    #[cfg(test)]
    pub(super) forgets_reads: bool,
}

impl Device {
    pub(super) fn new(driver: &Arc<dyn Driver>, poison: bool, guard: bool) -> Result<Self> {
        Ok(Self {
            copies: Arc::new(TransferStream::new(Arc::clone(driver))?),
            staging: None,
            mark: Event::new(Arc::clone(driver))?,
            driver: Arc::clone(driver),
            events: Vec::new(),
            prepared: Vec::new(),
            enqueued: Vec::new(),
            timers: CopyTimers::default(),
            since_mark: false,
            compute: None,
            poison,
            guard,
            #[cfg(test)]
            forgets_reads: false,
        })
    }

    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    pub(super) fn copies(&self) -> &TransferStream {
        &self.copies
    }

    /// In how many pieces a unit is copied.
    pub(super) fn pieces(&self, unit: usize) -> u64 {
        let staged = self.staging.as_ref().and_then(|staging| staging.copy_of(unit));
        let staged = staged.map_or(0, |copy| copy.pieces() as u64);
        self.prepared.get(unit).and_then(Option::as_ref).map_or(staged, |copy| copy.pieces() as u64)
    }

    /// Joins the device's staging ring if any bytes of the line, which is so long, are not page-locked.
    pub(super) fn join_ring(
        &mut self,
        source: &dyn Source,
        line: Bytes,
        options: &StagingOptions,
    ) -> Result<()> {
        if self.staging.is_none() {
            self.staging = Staging::join(source, line, &self.copies, options)?;
        }
        Ok(())
    }

    /// Leaves the ring. Blocks.
    pub(super) fn leave_ring(&mut self) -> Result<()> {
        if let Some(staging) = &mut self.staging {
            staging.close()?;
            self.staging = None;
        }
        Ok(())
    }

    /// Whether entering a unit may wait for its bytes to be read.
    pub(super) fn is_staged(&self) -> bool {
        self.staging.is_some()
    }

    /// The staging ring in numbers, if there is one.
    pub(super) fn staging(&self) -> Option<StagingReport> {
        self.staging.as_ref().map(Staging::report)
    }

    /// Works out a copy of bytes into the model's addresses.
    pub(super) fn copy_into(&self, space: &Arc<AddressSpace>, runs: Vec<LineRun>) -> Result<Copied> {
        if let Some(staging) = &self.staging {
            return Ok(Copied::Staged(staging.prepare(space, &runs)?));
        }
        let locked = runs.into_iter().map(|run| match run {
            LineRun::Locked(run) => Ok(run),
            LineRun::Staged { .. } => {
                Err(EngineError::Internal { what: "bytes are not page-locked any more" })
            }
        });
        Ok(Copied::Locked(PreparedCopy::new(space, &locked.collect::<Result<Vec<_>>>()?)?))
    }

    /// Makes copies outside any unit. Blocks until they have run.
    pub(super) fn upload(
        &mut self,
        copies: Vec<Copied>,
        stats: &mut EngineStats,
        during: &mut dyn FnMut(),
    ) -> Result<()> {
        let mut through_ring = Vec::new();
        for copy in copies {
            match copy {
                Copied::Locked(copy) => self.copies.enqueue(&copy)?,
                Copied::Staged(copy) => through_ring.push(copy),
            }
        }
        during();
        if let Some(staging) = &mut self.staging {
            staging.upload(through_ring, stats)?;
        }
        Ok(self.copies.drain()?)
    }

    /// How often a unit was copied since the plan was put in place.
    pub(super) fn copies_of(&self, unit: usize) -> u64 {
        self.enqueued.get(unit).copied().unwrap_or(0)
    }

    /// Whether anything is to be done when a unit's bytes are given up.
    pub(super) fn wants_evictions(&self) -> bool {
        self.poison || self.guard
    }

    /// Has events for `units` units. Changes nothing if it fails.
    pub(super) fn grow(&mut self, units: usize) -> Result<()> {
        while self.events.len() < units {
            let event = || Event::new(Arc::clone(&self.driver)).map(Arc::new);
            self.events.push(UnitEvents { copied: event()?, last_use: event()? });
        }
        Ok(())
    }

    /// Takes the copies of a plan's units. Both queues are idle.
    pub(super) fn prepare(&mut self, copies: Vec<Option<Copied>>) {
        self.enqueued.clear();
        self.enqueued.resize(copies.len(), 0);
        let (mut locked, mut staged) = (Vec::with_capacity(copies.len()), Vec::with_capacity(copies.len()));
        for copy in copies {
            let (one, other) = match copy {
                None => (None, None),
                Some(Copied::Locked(copy)) => (Some(copy), None),
                Some(Copied::Staged(copy)) => (None, Some(copy)),
            };
            locked.push(one);
            staged.push(other);
        }
        self.prepared = locked;
        if let Some(staging) = &mut self.staging {
            staging.take(staged);
        }
    }

    /// Makes `stream` the compute stream: it waits for what the one before it holds.
    pub(super) fn join(&mut self, stream: StreamHandle) -> Result<()> {
        if let Some(before) = self.compute.filter(|&before| before != stream) {
            self.set_mark(before)?;
            self.mark.hold(stream)?;
        }
        self.compute = Some(stream);
        Ok(())
    }

    /// Whether `stream` is the compute stream already.
    pub(super) fn computes_on(&self, stream: StreamHandle) -> bool {
        self.compute == Some(stream)
    }

    /// A mistake made on purpose: the next compute stream waits for nothing.
    #[cfg(test)]
    pub(super) fn forget_stream(&mut self) {
        self.compute = None;
    }

    /// Computation may follow on the compute stream.
    pub(super) fn note_computation(&mut self) {
        self.since_mark = true;
    }

    /// Marks the end of the computation so far, so that the compute stream is not needed any more for waiting.
    pub(super) fn mark_end(&mut self) -> Result<()> {
        match self.compute {
            Some(stream) => self.set_mark(stream),
            None => Ok(()),
        }
    }

    fn set_mark(&mut self, stream: StreamHandle) -> Result<()> {
        if self.since_mark {
            self.mark.record(stream)?;
            self.since_mark = false;
        }
        Ok(())
    }

    /// Blocks until all computation and all copies so far have run. Copies that wait to be read are taken back.
    pub(super) fn wait_idle(&mut self) -> Result<()> {
        self.mark_end()?;
        if let Some(staging) = &mut self.staging {
            staging.cancel()?;
        }
        self.mark.synchronize()?;
        Ok(self.copies.drain()?)
    }

    /// Whether all computation and all copies so far have run. Never blocks; an error counts as no.
    pub(super) fn is_idle(&mut self) -> bool {
        self.staging.as_ref().is_none_or(Staging::is_clear)
            && self.mark_end().is_ok()
            && matches!(self.mark.is_reached(), Ok(true))
            && matches!(self.copies.is_idle(), Ok(true))
    }

    /// Enqueues the schedule's commands, those of the compute side on the compute stream.
    pub(super) fn execute(
        &mut self,
        commands: &[Command],
        plan: &Plan,
        memory: &Memory,
        stats: &mut EngineStats,
    ) -> Result<()> {
        if let Some(mut staging) = self.staging.take() {
            let done = self.execute_staged(&mut staging, commands, plan, memory, stats);
            self.staging = Some(staging);
            return done;
        }
        for &command in commands {
            match command {
                Command::WaitLastUse(unit) => {
                    self.copies.wait(&self.of(unit)?.last_use)?;
                    stats.waits += 1;
                }
                Command::Evict(unit) => self.evict(unit, plan, memory)?,
                Command::Copy(unit) => self.copy(unit, plan, memory, stats)?,
                Command::RecordCopied(unit) => self.copies.record(&self.of(unit)?.copied)?,
                Command::WaitCopied(unit) => {
                    self.of(unit)?.copied.hold(self.compute()?)?;
                    stats.waits += 1;
                }
                Command::RecordLastUse(unit) => self.of(unit)?.last_use.record(self.compute()?)?,
            }
        }
        Ok(())
    }

    pub(super) fn of(&self, unit: UnitId) -> Result<&UnitEvents> {
        self.events.get(unit.0 as usize).ok_or_else(unknown)
    }

    pub(super) fn compute(&self) -> Result<StreamHandle> {
        self.compute.ok_or(EngineError::NoStep)
    }

    fn copy(&mut self, unit: UnitId, plan: &Plan, memory: &Memory, stats: &mut EngineStats) -> Result<()> {
        let Some(Some(copy)) = self.prepared.get(unit.0 as usize) else { return Err(unknown()) };
        let copy = Arc::clone(copy);
        if self.guard
            && let Some(planned) = plan.unit(unit)
        {
            memory.guard(&planned.streamed, Access::ReadWrite)?;
        }
        let bytes = copy.bytes().0;
        let start = self.timers.mark(&self.driver, &self.copies);
        self.copies.enqueue(&copy)?;
        if let Some(start) = start {
            self.timers.add(unit, bytes, start, &self.driver, &self.copies);
        }
        stats.copies += 1;
        stats.copied_bytes += bytes;
        self.count_copy(unit);
        Ok(())
    }

    pub(super) fn count_copy(&mut self, unit: UnitId) {
        if let Some(count) = self.enqueued.get_mut(unit.0 as usize) {
            *count += 1;
        }
    }

    /// The unit's bytes are about to be overwritten: spoils them, or shuts their addresses. The guard mode waits.
    fn evict(&self, unit: UnitId, plan: &Plan, memory: &Memory) -> Result<()> {
        let Some(planned) = plan.unit(unit) else { return Err(unknown()) };
        if self.poison {
            self.copies.fill(&memory.space, planned.streamed.start, planned.streamed_bytes(), POISON)?;
        }
        if self.guard {
            self.copies.drain()?;
            memory.guard(&planned.streamed, Access::None)?;
        }
        Ok(())
    }

    /// Spoils or shuts the streamed bytes of every unit: none is present. Both queues are idle. Blocks if it does
    /// anything.
    pub(super) fn evict_all(&self, plan: &Plan, memory: &Memory) -> Result<()> {
        let streamed = || plan.units.iter().filter(|unit| !unit.is_resident());
        if self.guard {
            memory.open_all()?;
        }
        if self.poison {
            for unit in streamed() {
                self.copies.fill(&memory.space, unit.streamed.start, unit.streamed_bytes(), POISON)?;
            }
            self.copies.drain()?;
        }
        if self.guard {
            for unit in streamed() {
                memory.guard(&unit.streamed, Access::None)?;
            }
        }
        Ok(())
    }
}

/// The schedule and the device are made for the same plan.
pub(super) fn unknown() -> EngineError {
    debug_assert!(false, "a command names a unit the plan does not have");
    EngineError::Internal { what: "a command names a unit the plan does not have" }
}
