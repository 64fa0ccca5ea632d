//! Putting a plan in place: pages, resident bytes, copies and a schedule, between steps.
//!
//! A plan that could not be put in place stays pending; the next step completes it before anything runs, whatever
//! state the failure left. The first plan goes the same way.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gpu_driver::{Bytes, DeviceOrdinal};
use pinned_pool::LineRun;

use super::device::Copied;
use super::error::{EngineError, Result};
use super::state::State;
use crate::layout::Layout;
use crate::plan::Plan;
use crate::schedule::Schedule;

/// An upload of so many bytes takes long enough to tell the link's rate.
const TELLING: u64 = 64 << 20;

impl State {
    /// Puts another plan in place. Blocks until all work has run.
    pub(super) fn replan(&mut self, plan: Plan, layout: &Layout) -> Result<()> {
        self.check_between("a replan")?;
        check_plan(&plan, layout, self.coming_limit())?;
        self.pending = Some(Arc::new(plan));
        self.place_unless_away()
    }

    /// Puts the pending plan in place, if the model is on the device; else it waits for the model to come.
    pub(super) fn place_unless_away(&mut self) -> Result<()> {
        if self.away { Ok(()) } else { self.replace_plan() }
    }

    /// Puts the pending plan in place, or leaves it pending.
    pub(super) fn replace_plan(&mut self) -> Result<()> {
        self.replace_plan_during(&mut || ())
    }

    /// As [`replace_plan`](Self::replace_plan); calls `during` while resident bytes are on their way, if it comes so far.
    pub(super) fn replace_plan_during(&mut self, during: &mut dyn FnMut()) -> Result<()> {
        let Some(plan) = self.pending.clone() else { return Ok(()) };
        #[cfg_attr(test, expect(unused_mut, reason = "a mistake may be made in it"))]
        let mut schedule = Schedule::for_plan(&plan).map_err(EngineError::Visit)?;
        #[cfg(test)]
        let mut schedule = super::tests::mutate_schedule(self.mutant, &plan, schedule);
        #[cfg(test)]
        let waits = self.mutant != Some(super::tests::Mutant::FreeBeforeEvent);
        #[cfg(not(test))]
        let waits = true;
        if waits {
            self.wait_idle()?;
        }
        let line = self.memory.space.size();
        self.device.join_ring(&*self.source, line, &self.staging)?;
        self.memory.reach(&plan)?;
        self.device.grow(plan.units.len())?;
        let copies = self.copies_of(&plan)?;
        self.upload(&plan, during)?;
        self.device.evict_all(&plan, &self.memory)?;
        self.device.prepare(copies);
        self.stats = self.stats();
        if self.held > 0 {
            schedule.keep_holds(&self.schedule); // Of the same units: else a hold refuses the plan.
        }
        self.schedule = schedule;
        self.schedule.announce_evictions(self.device.wants_evictions());
        self.visits = 0;
        // Nothing is present and all work was waited for, which is all that a recovery would see to.
        self.failed = false;
        self.plan = plan;
        self.pending = None;
        if let Some(limit) = self.limit_after.take() {
            self.set_page_limit(limit);
        }
        if std::mem::take(&mut self.away) {
            self.stats.arrivals += 1;
        } else {
            self.stats.replans += 1;
        }
        self.timing.forget();
        Ok(())
    }

    /// Copies to resident granules what they do not hold yet, and calls `during` meanwhile. Blocks.
    pub(super) fn upload(&mut self, plan: &Plan, during: &mut dyn FnMut()) -> Result<()> {
        #[cfg(test)]
        if self.mutant == Some(super::tests::Mutant::TrustPages) && self.stats.steps > 0 {
            self.memory.note_filled(plan);
            return Ok(());
        }
        let runs = self.memory.unfilled(plan);
        let copies = runs.iter().map(|run| self.prepared(&self.memory.bytes_of(run)));
        let copies = copies.collect::<Result<Vec<_>>>()?;
        let (uploaded, begun) = (copies.iter().map(|copy| copy.bytes().0).sum::<u64>(), Instant::now());
        if !copies.is_empty() {
            let mut spent = Duration::ZERO;
            let mut during = || {
                let begun = Instant::now();
                during();
                spent = begun.elapsed();
            };
            let done = self.device.upload(copies, &mut self.stats, &mut during);
            done.map_err(|error| self.explained(error))?;
            let elapsed = begun.elapsed();
            // Else the copies may have been there long before they were waited for.
            if uploaded >= TELLING && spent < elapsed / 2 {
                let rate = uploaded as f64 / elapsed.as_secs_f64();
                self.link_rate = Some(self.link_rate.unwrap_or(0.0).max(rate));
            }
        }
        self.stats.uploaded_bytes += uploaded;
        self.memory.note_filled(plan);
        Ok(())
    }

    /// The copy of each unit's streamed bytes, worked out once.
    fn copies_of(&self, plan: &Plan) -> Result<Vec<Option<Copied>>> {
        let copy = |unit: &crate::plan::UnitPlan| {
            if unit.is_resident() {
                return Ok(None);
            }
            #[cfg(test)]
            if self.mutant == Some(super::tests::Mutant::SkipPage) {
                let end = unit.streamed.end - unit.streamed_bytes().0.min(plan.granule.0);
                return self.prepared(&(unit.streamed.start..end)).map(Some);
            }
            self.prepared(&unit.streamed).map(Some)
        };
        plan.units.iter().map(copy).collect()
    }

    fn prepared(&self, line: &Range<u64>) -> Result<Copied> {
        let DeviceOrdinal(device) = self.device.driver().device_info().ordinal;
        let mut runs: Vec<LineRun> = Vec::new();
        for part in self.source.parts(line) {
            if part.reader.0 != device {
                return Err(EngineError::ForeignReader { reader: part.reader.0, device });
            }
            runs.push(part.run);
        }
        self.device.copy_into(&self.memory.space, runs)
    }
}

/// Refuses a plan of another line, or one that the page limit does not allow.
pub(super) fn check_plan(plan: &Plan, layout: &Layout, limit: Bytes) -> Result<()> {
    if plan.granule != layout.granule() || plan.backing.len() != layout.granules() as usize {
        let (pages, granules) = (plan.backing.len(), layout.granules());
        let what =
            format!("{pages} granules of {} for a line of {granules} of {}", plan.granule, layout.granule());
        return Err(EngineError::ForeignPlan { what });
    }
    if cfg!(debug_assertions) {
        plan.check(layout).map_err(|error| EngineError::ForeignPlan { what: error.to_string() })?;
    }
    if plan.physical_bytes() > limit {
        return Err(EngineError::PageLimit { needed: plan.physical_bytes(), limit });
    }
    Ok(())
}
