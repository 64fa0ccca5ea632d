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
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::{Driver, StreamHandle};
use pinned_pool::Event;

use crate::model::UnitId;

/// What the visits of one step computed.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTimes {
    /// The units visited, in order, resident ones included, each with its seconds.
    pub visits: Vec<(UnitId, f64)>,
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
    /// Two a visit, `start` before them and `end` behind them.
    timers: Vec<Event>,
    recorded: usize,
    visits: Vec<UnitId>,
}

impl Timing {
    pub(super) fn new() -> Self {
        Self { phase: Phase::Off, timers: Vec::new(), recorded: 0, visits: Vec::new() }
    }

    /// The next step is timed.
    pub(super) fn arm(&mut self) {
        self.phase = Phase::Armed;
    }

    /// What was begun is given up; a step that is timed must be one of this plan, whole and without errors.
    pub(super) fn give_up(&mut self) {
        if self.phase == Phase::Running {
            self.phase = Phase::Off;
        }
    }

    /// Nothing is timed, and what was is forgotten: it was of another plan.
    pub(super) fn forget(&mut self) {
        self.phase = Phase::Off;
        self.timers.clear();
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

    pub(super) fn end_step(&mut self, driver: &Arc<dyn Driver>, stream: StreamHandle) {
        if self.phase == Phase::Running {
            self.record(driver, stream);
            let whole = self.phase == Phase::Running && !self.visits.is_empty();
            self.phase =
                if whole && self.recorded == 2 * self.visits.len() + 2 { Phase::Ended } else { Phase::Off };
        }
    }

    /// The times of the step that was timed, once; `None` if there is none, or the device has not come to its end.
    pub(super) fn take(&mut self) -> Option<StepTimes> {
        if self.phase != Phase::Ended {
            return None;
        }
        let times = self.times();
        if !matches!(times, Ok(None)) {
            self.forget();
        }
        times.ok().flatten()
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
