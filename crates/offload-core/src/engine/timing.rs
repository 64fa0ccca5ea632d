//! How long the visits of one step compute, measured on the device with events that keep their time.
//!
//! ```text
//!   compute stream   start ─ … ─ reached 0 ─ hold(copied 0) ─ free 0 ─ kernels ─ reached 1 ─ hold ─ free 1 ─ … ─ end
//!   a visit's time                                             └────── 0 ──────┘                    └ … ─┘
//! ```
//!
//! Waiting for a copy is in nobody's time; what is computed between two visits is in that of the first. What a step
//! computes before its first visit is added to the last, after which it comes. Nothing here makes the host wait or
//! makes a step fail: what cannot be measured is not.
//!
//! A step that is traced is timed in the same way, and its copies with two events each on the copy stream.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::{Driver, StreamHandle};
use pinned_pool::{Event, TransferStream};

use crate::model::UnitId;

/// What the visits of one step computed.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes {
    /// The units visited, in order, resident ones included, each with its seconds.
    pub visits: Vec<(UnitId, f64)>,
}

/// One step on the device's clock: seconds from its beginning.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTrace {
    /// The visits, in order.
    pub visits: Vec<VisitTrace>,
    /// The copies that were submitted in the step, in order; those that pass through the staging ring are not among them.
    /// What was submitted in the step before is not either, and what ends after the step is.
    pub copies: Vec<CopyTrace>,
    /// How long the step took.
    pub seconds: f64,
}

/// A visit in a traced step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct VisitTrace {
    /// The unit.
    pub unit: UnitId,
    /// When the device came to it.
    pub reached: f64,
    /// When its bytes were there.
    pub free: f64,
    /// When the device came to the next, or to the end of the step.
    pub end: f64,
}

/// A copy in a traced step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CopyTrace {
    /// The unit.
    pub unit: UnitId,
    /// How much.
    pub bytes: u64,
    /// When it began.
    pub start: f64,
    /// When it had ended.
    pub end: f64,
}

/// A copy between two timers.
#[derive(Debug)]
pub(super) struct TimedCopy {
    unit: UnitId,
    bytes: u64,
    start: Event,
    end: Event,
}

/// The copies so far of a step that is traced; of no other any.
#[derive(Debug, Default)]
pub(super) struct CopyTimers(Option<Vec<TimedCopy>>);

impl CopyTimers {
    /// A step begins, whose copies are timed or not.
    pub(super) fn begin(&mut self, timed: bool) {
        self.0 = timed.then(Vec::new);
    }

    /// What was timed; nothing is from here on.
    pub(super) fn take(&mut self) -> Option<Vec<TimedCopy>> {
        self.0.take()
    }

    /// A timer behind what the copy stream holds, if copies are timed. A driver that refuses one ends their timing and
    /// nothing else.
    pub(super) fn mark(&mut self, driver: &Arc<dyn Driver>, copies: &TransferStream) -> Option<Event> {
        self.0.as_ref()?;
        match Event::timer(Arc::clone(driver)).and_then(|timer| copies.record(&timer).map(|()| timer)) {
            Ok(timer) => Some(timer),
            Err(error) => {
                tracing::debug!(%error, "the copies of a step are not timed");
                self.0 = None;
                None
            }
        }
    }

    /// A copy was submitted behind `start`.
    pub(super) fn add(
        &mut self,
        unit: UnitId,
        bytes: u64,
        start: Event,
        driver: &Arc<dyn Driver>,
        copies: &TransferStream,
    ) {
        if let Some(end) = self.mark(driver, copies)
            && let Some(timed) = &mut self.0
        {
            timed.push(TimedCopy { unit, bytes, start, end });
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Off,
    /// The next step is to be timed.
    Armed,
    /// The step under way is being timed.
    Running,
    /// A step was timed; the device may not have come to its end yet.
    Ended,
}

/// The timers of one step.
#[derive(Debug)]
pub(super) struct Timing {
    phase: Phase,
    /// Who asked for the step: for its times, or for its trace.
    wants_times: bool,
    wants_trace: bool,
    copies: Vec<TimedCopy>,
    /// Two a visit, `start` before them and `end` behind them.
    timers: Vec<Event>,
    recorded: usize,
    visits: Vec<UnitId>,
}

impl Timing {
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Off,
            wants_times: false,
            wants_trace: false,
            copies: Vec::new(),
            timers: Vec::new(),
            recorded: 0,
            visits: Vec::new(),
        }
    }

    /// The next step is timed.
    pub(super) fn arm(&mut self) {
        self.phase = Phase::Armed;
        self.wants_times = true;
    }

    /// The next step is traced; if it is none that can be, the one after it.
    pub(super) fn arm_trace(&mut self) {
        self.phase = Phase::Armed;
        self.wants_trace = true;
    }

    /// Whether the copies of the step under way are to be timed.
    pub(super) fn traces(&self) -> bool {
        self.wants_trace && self.phase == Phase::Running
    }

    /// What was begun is given up; a step that is timed must be one of this plan, whole and without errors.
    pub(super) fn give_up(&mut self) {
        if self.phase == Phase::Running {
            self.phase = self.at_rest();
        }
    }

    /// Nothing is timed, and what was is forgotten: it was of another plan.
    pub(super) fn forget(&mut self) {
        self.wants_times = false;
        self.clear();
    }

    fn clear(&mut self) {
        self.phase = self.at_rest();
        self.timers.clear();
        self.copies.clear();
    }

    /// A trace that was asked for is made of a later step.
    fn at_rest(&self) -> Phase {
        if self.wants_trace { Phase::Armed } else { Phase::Off }
    }

    pub(super) fn begin_step(&mut self, driver: &Arc<dyn Driver>, stream: StreamHandle) {
        if matches!(self.phase, Phase::Armed | Phase::Running) {
            self.phase = Phase::Running;
            self.recorded = 0;
            self.visits.clear();
            self.record(driver, stream);
        }
    }

    /// A visit is reached; its unit may still be on its way. `inside` another visit, nothing can be told apart.
    pub(super) fn reached(&mut self, driver: &Arc<dyn Driver>, stream: StreamHandle, inside: bool) {
        if self.phase == Phase::Running {
            if inside {
                return self.give_up();
            }
            self.record(driver, stream);
        }
    }

    /// The unit of the visit last reached is there.
    pub(super) fn free(&mut self, driver: &Arc<dyn Driver>, stream: StreamHandle, unit: UnitId) {
        if self.phase == Phase::Running {
            self.visits.push(unit);
            self.record(driver, stream);
        }
    }

    pub(super) fn end_step(
        &mut self,
        driver: &Arc<dyn Driver>,
        stream: StreamHandle,
        copies: Option<Vec<TimedCopy>>,
    ) {
        if self.phase == Phase::Running {
            self.record(driver, stream);
            let whole = self.phase == Phase::Running && !self.visits.is_empty();
            let whole = whole && self.recorded == 2 * self.visits.len() + 2;
            self.phase = if whole { Phase::Ended } else { self.at_rest() };
            self.copies = copies.unwrap_or_default();
        }
    }

    /// The times of the step that was timed, once; `None` if there is none, or the device has not come to its end.
    pub(super) fn take(&mut self) -> Option<StepTimes> {
        if self.phase != Phase::Ended || !self.wants_times {
            return None;
        }
        let times = self.times();
        if !matches!(times, Ok(None)) {
            self.wants_times = false;
            if !self.wants_trace {
                self.clear();
            }
        }
        times.ok().flatten()
    }

    /// The trace of the step that was traced, once; `None` if there is none, or if the device has not come to its end.
    pub(super) fn take_trace(&mut self) -> Option<StepTrace> {
        if self.phase != Phase::Ended || !self.wants_trace {
            return None;
        }
        let trace = self.trace();
        if !matches!(trace, Ok(None)) {
            self.wants_trace = false;
            if !self.wants_times {
                self.clear();
            }
        }
        trace.ok().flatten()
    }

    /// The trace, or `None` if the device has not come to the end of the step and its copies.
    fn trace(&self) -> pinned_pool::Result<Option<StepTrace>> {
        let first = &self.timers[0];
        // The copy stream may be ahead of the compute stream: what began before the step shows from its beginning.
        let at = |event: &Event| first.seconds_until(event).map(|at| at.map(|at| at.max(0.0)));
        let last = 2 * self.visits.len() + 1;
        let Some(seconds) = at(&self.timers[last])? else { return Ok(None) };
        let mut visits = Vec::with_capacity(self.visits.len());
        for (number, &unit) in self.visits.iter().enumerate() {
            let timer = |place: usize| at(&self.timers[2 * number + place]);
            let (Some(reached), Some(free), Some(end)) = (timer(1)?, timer(2)?, timer(3)?) else {
                return Ok(None);
            };
            visits.push(VisitTrace { unit, reached, free, end });
        }
        let mut copies = Vec::with_capacity(self.copies.len());
        for copy in &self.copies {
            let (Some(start), Some(end)) = (at(&copy.start)?, at(&copy.end)?) else { return Ok(None) };
            copies.push(CopyTrace { unit: copy.unit, bytes: copy.bytes, start, end: end.max(start) });
        }
        Ok(Some(StepTrace { visits, copies, seconds }))
    }

    /// The times, or `None` if the device has not come to the end.
    fn times(&self) -> pinned_pool::Result<Option<StepTimes>> {
        let between = |from: usize, to: usize| self.timers[from].seconds_until(&self.timers[to]);
        let last = 2 * self.visits.len() + 1;
        // All others were recorded before the last, on streams that wait for one another.
        let Some(lead) = between(0, last)?.and(between(0, 1)?) else { return Ok(None) };
        let mut visits = Vec::with_capacity(self.visits.len());
        for (number, &unit) in self.visits.iter().enumerate() {
            let Some(seconds) = between(2 * number + 2, 2 * number + 3)? else { return Ok(None) };
            visits.push((unit, seconds.max(0.0)));
        }
        if let Some((_, seconds)) = visits.last_mut() {
            *seconds += lead.max(0.0);
        }
        Ok(Some(StepTimes { visits }))
    }

    fn record(&mut self, driver: &Arc<dyn Driver>, stream: StreamHandle) {
        if self.recorded == self.timers.len() {
            match Event::timer(Arc::clone(driver)) {
                Ok(timer) => self.timers.push(timer),
                Err(error) => return self.fail(&error),
            }
        }
        if let Err(error) = self.timers[self.recorded].record(stream) {
            return self.fail(&error);
        }
        self.recorded += 1;
    }

    fn fail(&mut self, error: &pinned_pool::HostError) {
        tracing::debug!(%error, "a step is not timed");
        self.give_up();
    }
}
