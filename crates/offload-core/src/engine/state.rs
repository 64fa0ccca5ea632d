//! What the engine's lock protects: steps and visits, who makes them, and what an error leaves to be done.
//!
//! ```text
//!            begin_step                 enter, leave …               end_step
//!   idle ────────────────▶ step of one thread ──────────────────────▶ idle
//!     ▲                        │ a driver call fails, or the step is never ended
//!     │   begin_step:          ▼
//!     └── wait for all work ── failed: enter refuses, leave and end_step only close
//! ```
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::thread::{self, ThreadId};

use gpu_driver::{Bytes, StreamHandle};
use pinned_pool::{HostError, StagingOptions};

use super::device::Device;
use super::error::{EngineError, Result};
use super::memory::Memory;
use super::source::Source;
use super::stats::EngineStats;
use super::timing::Timing;
use crate::layout::Layout;
use crate::model::{TensorId, UnitId};
use crate::plan::Plan;
use crate::schedule::{Command, Schedule, ScheduleError};

/// A step, or a visit outside any step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    thread: ThreadId,
    /// Whether it was begun by `begin_step`.
    marked: bool,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) plan: Arc<Plan>,
    pub(super) schedule: Schedule,
    pub(super) memory: Memory,
    pub(super) device: Device,
    pub(super) source: Arc<dyn Source>,
    pub(super) staging: StagingOptions,
    /// Where tensors begin on the line, in order.
    starts: Vec<(u64, TensorId)>,
    pub(super) stats: EngineStats,
    /// The most of a shared pool that a plan may take; the pool's own limit if it is not shared.
    pub(super) most: Option<Bytes>,
    /// A plan to be put in place before anything runs.
    pub(super) pending: Option<Arc<Plan>>,
    /// The page limit that counts once the pending plan is in place, if that is lower than the one before.
    pub(super) limit_after: Option<Bytes>,
    /// Whether a call failed, so that presence is not known.
    pub(super) failed: bool,
    /// What the end of the step under way has to say: memory was taken from its units.
    pub(super) owed: Option<EngineError>,
    pub(super) closed: bool,
    /// Whether the model left the device: its own pages are others' now, or it has not come yet.
    pub(super) away: bool,
    pub(super) step: Option<Step>,
    /// Visits entered and not left.
    pub(super) visits: u32,
    /// Holds not released. What they are for may be computed at any time.
    pub(super) held: u32,
    pub(super) commands: Vec<Command>,
    pub(super) timing: Timing,
    /// The fastest that resident bytes were ever uploaded, in bytes a second.
    pub(super) link_rate: Option<f64>,
    #[cfg(test)]
    pub(super) mutant: Option<super::tests::Mutant>,
}

impl State {
    pub(super) fn new(
        plan: Arc<Plan>,
        memory: Memory,
        device: Device,
        source: Arc<dyn Source>,
        staging: StagingOptions,
        layout: &Layout,
    ) -> Result<Self> {
        let mut starts: Vec<_> = (0..layout.tensors() as u32)
            .map(TensorId)
            .map(|tensor| (layout.offset(tensor), tensor))
            .collect();
        starts.sort_unstable();
        let memory_is_shared = memory.shared().is_some();
        Ok(Self {
            schedule: Schedule::for_plan(&plan).map_err(EngineError::Visit)?,
            pending: Some(Arc::clone(&plan)),
            plan,
            memory,
            device,
            source,
            staging,
            starts,
            stats: EngineStats::default(),
            most: None,
            limit_after: None,
            failed: false,
            owed: None,
            closed: false,
            away: memory_is_shared,
            step: None,
            visits: 0,
            held: 0,
            commands: Vec::new(),
            timing: Timing::new(),
            link_rate: None,
            #[cfg(test)]
            mutant: None,
        })
    }

    /// A step begins. One of this thread that was never ended is given up first.
    pub(super) fn begin_step(&mut self, stream: StreamHandle) -> Result<()> {
        self.check_thread()?;
        if self.step.take().is_some() {
            self.failed = true;
        }
        self.owed = None;
        self.prepare(stream)?;
        self.commands.clear();
        self.schedule.begin_step(&mut self.commands);
        self.run_commands()?;
        self.step = Some(Step { thread: thread::current().id(), marked: true });
        self.timing.begin_step(self.device.driver(), stream);
        self.device.timers.begin(self.timing.traces());
        self.stats.steps += 1;
        Ok(())
    }

    /// A step ends; the next one's first copies begin.
    pub(super) fn end_step(&mut self, stream: StreamHandle) -> Result<()> {
        self.check_thread()?;
        if !self.step.is_some_and(|step| step.marked) {
            return Err(EngineError::NoStep);
        }
        self.step = None;
        if self.visits > 0 {
            self.failed = true; // A unit was never left: the step was cut short.
        }
        if self.failed {
            self.timing.give_up();
            // Else it was reported when it happened.
            return self.owed.take().map_or(Ok(()), Err);
        }
        self.commands.clear();
        self.schedule.end_step(&mut self.commands);
        self.on_stream(stream)?;
        let copies = self.device.timers.take();
        self.timing.end_step(self.device.driver(), stream, copies);
        let marked = self.device.mark_end();
        self.failed |= marked.is_err();
        marked?;
        self.run_commands()
    }

    /// A unit's turn begins: after this, work on `stream` reads its bytes.
    pub(super) fn enter(&mut self, unit: UnitId, stream: StreamHandle) -> Result<()> {
        self.check_thread()?;
        let outside = self.step.is_none();
        if outside {
            self.prepare(stream)?;
        } else if self.failed {
            return Err(EngineError::StepFailed);
        } else if !self.device.computes_on(stream) {
            // A capture takes a stream of its own, so that one that was checked need not be asked again at each visit.
            self.check_capture(stream)?;
        }
        self.commands.clear();
        self.schedule.enter(unit, &mut self.commands).map_err(|error| self.named(error))?;
        // The unit is open from here on, so what fails now leaves something to recover.
        self.visits += 1;
        self.stats.visits += 1;
        self.step.get_or_insert(Step { thread: thread::current().id(), marked: false });
        let entered = self.on_stream(stream).and_then(|()| {
            self.device.note_computation();
            self.timing.reached(self.device.driver(), stream, self.visits > 1);
            self.run_commands()
        });
        self.timing.free(self.device.driver(), stream, unit);
        if entered.is_err() {
            self.visits -= 1;
            self.end_visit_outside();
        }
        entered
    }

    /// A unit's turn ends: its bytes may be overwritten once what `stream` holds now has run.
    pub(super) fn leave(&mut self, unit: UnitId, stream: StreamHandle) -> Result<()> {
        self.check_thread()?;
        if self.failed {
            self.visits = self.visits.saturating_sub(1);
            let marked = self.step.is_some_and(|step| step.marked);
            self.end_visit_outside();
            // Else it was reported when it happened; the next step starts over.
            return if marked { Ok(()) } else { self.owed.take().map_or(Ok(()), Err) };
        }
        self.commands.clear();
        self.schedule.leave(unit, &mut self.commands).map_err(|error| self.named(error))?;
        self.visits -= 1;
        let left = self.on_stream(stream).and_then(|()| self.run_commands());
        self.end_visit_outside();
        left
    }

    /// Gives up whatever step is under way, on any thread.
    pub(super) fn abandon(&mut self) {
        if self.step.take().is_some() {
            self.failed = true;
        }
    }

    /// The most bytes of pages that a plan may take.
    pub(super) fn page_limit(&self) -> Bytes {
        self.most.unwrap_or_else(|| self.memory.pool.report().limit)
    }

    /// Changes what [`page_limit`](Self::page_limit) gives.
    pub(super) fn set_page_limit(&mut self, limit: Bytes) {
        match &mut self.most {
            Some(most) => *most = limit,
            None => self.memory.pool.set_limit(limit),
        }
    }

    /// The call is for the thread whose step this is.
    pub(super) fn check_thread(&self) -> Result<()> {
        if self.closed {
            return Err(EngineError::Closed);
        }
        match self.step {
            Some(step) if step.thread != thread::current().id() => Err(EngineError::OtherThread),
            _ => Ok(()),
        }
    }

    pub(super) fn check_capture(&self, stream: StreamHandle) -> Result<()> {
        if self.device.driver().is_capturing(stream)? {
            return Err(EngineError::Capturing { stream });
        }
        Ok(())
    }

    /// Makes good what an earlier call left, so that a step or a visit can begin. Blocks only if there is something.
    pub(super) fn prepare(&mut self, stream: StreamHandle) -> Result<()> {
        self.check_capture(stream)?;
        if self.pending.is_some() {
            self.replace_plan()?; // Starts from nothing present, as a recovery does.
        } else if self.away {
            self.come_back(&mut || ())?;
        } else if self.failed {
            self.recover()?;
        }
        self.on_stream(stream)?;
        self.refill()
    }

    /// Waits for all work and starts from nothing present.
    fn recover(&mut self) -> Result<()> {
        self.wait_idle()?;
        self.forget_presence()?;
        self.stats.recoveries += 1;
        Ok(())
    }

    /// Nothing streamed is present from here on. All work was waited for.
    pub(super) fn forget_presence(&mut self) -> Result<()> {
        self.schedule.reset();
        self.visits = 0;
        self.device.evict_all(&self.plan, &self.memory)?;
        self.failed = false;
        Ok(())
    }

    /// Copies held units that a recovery took away.
    fn refill(&mut self) -> Result<()> {
        self.commands.clear();
        self.schedule.refill(&mut self.commands);
        self.run_commands()
    }

    /// A visit outside any step is over when nothing is open.
    fn end_visit_outside(&mut self) {
        if self.visits == 0 && self.step.is_some_and(|step| !step.marked) {
            self.step = None;
        }
    }

    /// Blocks until all work has run.
    pub(super) fn wait_idle(&mut self) -> Result<()> {
        if self.held > 0 {
            self.device.note_computation();
        }
        self.device.wait_idle()
    }

    pub(super) fn on_stream(&mut self, stream: StreamHandle) -> Result<()> {
        if self.held > 0 {
            self.device.note_computation();
        }
        #[cfg(test)]
        if self.mutant == Some(super::tests::Mutant::DropHandoff) {
            self.device.forget_stream();
        }
        let joined = self.device.join(stream);
        self.failed |= joined.is_err();
        joined
    }

    pub(super) fn run_commands(&mut self) -> Result<()> {
        #[cfg(test)]
        super::tests::mutate(self.mutant, &mut self.commands);
        let done = self.device.execute(&self.commands, &self.plan, &self.memory, &mut self.stats);
        self.failed |= done.is_err();
        done.map_err(|error| self.explained(error))
    }

    #[cfg(test)]
    pub(super) fn set_mutant(&mut self, mutant: Option<super::tests::Mutant>) {
        self.mutant = mutant;
        self.memory.keeps_spare = mutant == Some(super::tests::Mutant::KeepPages);
        self.device.forgets_reads = mutant == Some(super::tests::Mutant::DropWaitSubmitted);
    }

    /// What was done so far, by this schedule and those before it.
    pub(super) fn stats(&self) -> EngineStats {
        let fetched_on_demand = self.stats.fetched_on_demand + self.schedule.fetched_on_demand();
        EngineStats { fetched_on_demand, ..self.stats }
    }

    /// An error of a read, with the tensor it is of.
    pub(super) fn explained(&self, error: EngineError) -> EngineError {
        let EngineError::Host(HostError::Unread { offset, cause }) = error else { return error };
        let after = self.starts.partition_point(|&(start, _)| start <= offset);
        match after.checked_sub(1).and_then(|at| self.starts.get(at)) {
            Some(&(_, tensor)) => EngineError::Unread { tensor, cause: *cause },
            None => EngineError::Host(*cause),
        }
    }

    pub(super) fn named(&self, error: ScheduleError) -> EngineError {
        let name = |unit: UnitId| self.plan.unit(unit).map_or_else(String::new, |unit| unit.name.clone());
        match error {
            ScheduleError::Conflict { unit, open } => {
                EngineError::Conflict { unit: name(unit), open: name(open) }
            }
            other => EngineError::Visit(other),
        }
    }
}
