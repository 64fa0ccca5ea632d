//! Another page limit between steps, with the plan that is made for it.
//!
//! ```text
//!   raise   limit up ── new pages, uploads ── plan in place                fails: the plan before, then the limit before
//!   lower   pages to others or back ── plan in place ── limit down         fails: the next step goes on from there
//! ```
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::Bytes;

use super::core::Engine;
use super::error::{EngineError, Result};
use super::replan::check_plan;
use super::state::State;
use crate::layout::Layout;
use crate::plan::{Plan, UnitPlan};
use crate::schedule::{Schedule, ScheduleError};

impl Engine {
    /// As [`replan`](Self::replan), with `limit` as the most that this and later plans may take: the pool's limit, or the
    /// model's part of a shared pool. Resident bytes that both plans have stay; only what becomes resident is copied.
    ///
    /// The pages held never exceed the higher of the two limits. A lower one counts once its plan is in place, so that after a
    /// failure of the driver it is the next step that makes it true; a higher one that fails leaves plan and limit
    /// as they were, put back at once or by the next step.
    ///
    /// # Errors
    /// As [`replan`](Self::replan). [`coming_limit`](Self::coming_limit) tells the two kinds of failure apart.
    pub fn rebudget(&self, plan: Plan, limit: Bytes) -> Result<()> {
        self.lock().rebudget(plan, limit, self.layout())
    }

    /// As [`rebudget`](Self::rebudget) with a lower limit, but also in the middle of a step of this thread: for when the device runs
    /// out of memory there. Units stay, those in use are copied anew where they streamed or stream now, and the step goes on.
    /// Blocks until all work has run. Work that uses the units goes on on the stream of the latest call.
    ///
    /// # Errors
    /// If the plan has other units, does not fit, or cannot have all units in use at once; if another thread is in the middle of a step
    /// or the stream is being captured: nothing was changed. If the driver fails, in a step, that step is over: what
    /// computes in it from here on may read anything, and its end says so.
    pub fn shrink(&self, plan: Plan, limit: Bytes) -> Result<()> {
        self.lock().shrink(plan, limit, self.layout())
    }

    /// The most that plans may take, once a plan that is pending is in place.
    pub fn coming_limit(&self) -> Bytes {
        self.lock().coming_limit()
    }

    /// The plan in place, or the one that is put in place before anything runs.
    pub fn coming_plan(&self) -> Arc<Plan> {
        let state = self.lock();
        Arc::clone(state.pending.as_ref().unwrap_or(&state.plan))
    }

    /// Refuses what a [`replan`](Self::replan) would: `call` is possible between steps only.
    ///
    /// # Errors
    /// If a step is under way or a unit is held.
    pub fn check_between(&self, call: &'static str) -> Result<()> {
        self.lock().check_between(call)
    }
}

impl State {
    /// The most that plans may take, once what is pending is in place.
    pub(super) fn coming_limit(&self) -> Bytes {
        self.limit_after.unwrap_or_else(|| self.page_limit())
    }

    /// Puts a plan in place together with the page limit it is made for. A lower limit counts from when the plan is in place,
    /// a higher one only if it came to that.
    pub(super) fn rebudget(&mut self, plan: Plan, limit: Bytes, layout: &Layout) -> Result<()> {
        self.check_between("another budget")?;
        check_plan(&plan, layout, limit)?;
        let plan = Arc::new(plan);
        let before = self.page_limit();
        if limit < before {
            // Until the plan is in place the pages of the one before are held; what is left to do, the next step does.
            (self.pending, self.limit_after) = (Some(plan), Some(limit));
            return self.place_unless_away();
        }
        let (pending, after) = (self.pending.replace(plan), self.limit_after.take());
        self.set_page_limit(limit);
        let placed = self.place_unless_away();
        if placed.is_err() {
            // The device may have no more memory to give: the plan before needs none that was not held.
            self.pending = pending.or_else(|| Some(Arc::clone(&self.plan)));
            self.limit_after = after;
            self.set_page_limit(before);
            _ = self.replace_plan();
        }
        placed
    }

    /// Puts a smaller plan of the same units in place, in a step or between.
    pub(super) fn shrink(&mut self, plan: Plan, limit: Bytes, layout: &Layout) -> Result<()> {
        self.check_thread()?;
        if self.step.is_none() && self.held == 0 {
            return self.rebudget(plan, limit, layout);
        }
        if self.failed {
            return Err(EngineError::StepFailed);
        }
        check_plan(&plan, layout, limit.min(self.coming_limit()))?;
        let same = |(new, old): (&UnitPlan, &UnitPlan)| new.span == old.span;
        if plan.units.len() != self.plan.units.len() || !plan.units.iter().zip(&self.plan.units).all(same) {
            return Err(EngineError::ForeignPlan {
                what: "it is of other units than the step under way".into(),
            });
        }
        let mut schedule = Schedule::for_plan(&plan).map_err(EngineError::Visit)?;
        schedule.resume(&self.schedule);
        if let Some((unit, open)) = schedule.crowded() {
            return Err(self.named(ScheduleError::Conflict { unit, open }));
        }
        self.check_capture(self.device.compute()?)?;
        // What allocates in a unit's turn has submitted some of it already.
        self.device.note_computation();
        (self.pending, self.limit_after) = (Some(Arc::new(plan)), Some(limit));
        let (visits, timing) = (self.visits, &mut self.timing);
        timing.give_up();
        drop(self.device.timers.take());
        let placed = self.replace_plan().and_then(|()| {
            (self.schedule, self.visits) = (schedule, visits);
            self.commands.clear();
            self.schedule.refill(&mut self.commands);
            #[cfg(test)]
            if self.mutant == Some(super::tests::Mutant::ForgetOpen) {
                self.commands.clear();
            }
            self.run_commands()
        });
        self.device.note_computation(); // Of what is open, which goes on.
        if placed.is_err() {
            // The step's computation goes on in memory that may be another's: its end must not pass for a success.
            (self.failed, self.visits) = (true, visits);
            self.owed = self.step.map(|_| EngineError::StepFailed);
        }
        placed
    }
}
