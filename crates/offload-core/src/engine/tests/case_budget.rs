//! A random case's budgets: raised and lowered between steps, and shrunk in the middle of them.

use gpu_driver::Bytes;

use super::case::{Case, REPLANNING, is_injected};
use super::desc::minimum;
use super::rig::Failure;
use crate::engine::EngineError;
use crate::plan::{Backing, Plan, PlanRequest};

impl Case {
    /// Another budget for the units there are, as the planner gives it; what the driver refuses is as it was, or is done by the
    /// next step.
    pub(super) fn rebudget(&mut self) -> Result<(), Failure> {
        self.rig.engine.abandon_step();
        let now = self.rig.engine.coming_plan();
        let (units, layout) = (now.described_units(), self.rig.engine.layout().clone());
        let least = minimum(&layout, &units);
        let all = u64::from(layout.granules()) * layout.granule().0;
        let room = self.rng.below(all.saturating_sub(least) + 1);
        let budget = least + self.rng.pick(&[0, room / 2, room, room]);
        let lower = budget < self.budget;
        let request = PlanRequest {
            budget: Some(Bytes(budget)),
            within: lower.then(|| now.backing.clone()),
            ..PlanRequest::default()
        };
        let next = Plan::new(&layout, &units, &request).map_err(|error| Failure::Left(error.to_string()))?;
        let new = next.backing.iter().zip(&now.backing);
        let new = new.filter(|(next, now)| **next == Backing::Own && **now != Backing::Own).count() as u64;
        let fault = self.rng.once_in(3);
        if fault {
            self.arm(&REPLANNING);
        }
        let was_pending = self.rig.engine.report().replan_pending;
        let uploaded = self.rig.engine.stats().uploaded_bytes;
        let done = self.rig.engine.rebudget(next, Bytes(budget));
        self.rig.device.reset();
        let counts = self.rig.engine.coming_limit().0;
        match done {
            Err(error) if fault && is_injected(&error) => {
                // A higher limit than the one in force is as if it had not been asked for.
                if counts == budget {
                    self.tally.completed += 1;
                } else if counts == self.budget {
                    self.tally.unraised += 1;
                } else {
                    return Err(Failure::Left(format!(
                        "{counts} of {} and {budget} is promised",
                        self.budget
                    )));
                }
            }
            other => {
                other?;
                if counts != budget {
                    return Err(Failure::Left(format!("{counts} is promised, {budget} was asked for")));
                }
                *if lower { &mut self.tally.lowers } else { &mut self.tally.raises } += 1;
                let (uploaded, most) =
                    (self.rig.engine.stats().uploaded_bytes - uploaded, new * layout.granule().0);
                if !was_pending && uploaded > most {
                    return Err(Failure::Left(format!(
                        "{uploaded} bytes were copied, {most} became resident"
                    )));
                }
            }
        }
        (self.budget, self.highest) = (counts, self.highest.max(budget));
        self.late = false;
        self.copies_before = self.rig.engine.stats().copies;
        self.check_pages()
    }

    /// No more pages are held than the budget allows, unless a failure left giving them back to the next step.
    pub(super) fn check_pages(&self) -> Result<(), Failure> {
        let report = self.rig.engine.report();
        let allowed = if report.replan_pending { self.highest } else { self.budget };
        if report.page_bytes_in_use > allowed {
            return Err(Failure::Left(format!("{} bytes of pages of {allowed}", report.page_bytes_in_use)));
        }
        Ok(())
    }

    /// The device runs out of memory in the middle of a step: a smaller budget at once.
    pub(super) fn shrink(&mut self) -> Result<(), Failure> {
        let now = self.rig.engine.coming_plan();
        let (units, layout) = (now.described_units(), self.rig.engine.layout().clone());
        let least = minimum(&layout, &units);
        let budget = least + self.rng.below(self.budget.saturating_sub(least) + 1);
        let request = PlanRequest {
            budget: Some(Bytes(budget)),
            within: Some(now.backing.clone()),
            ..PlanRequest::default()
        };
        let next = Plan::new(&layout, &units, &request).map_err(|error| Failure::Left(error.to_string()))?;
        let fault = self.rng.once_in(4);
        if fault {
            self.arm(&REPLANNING);
        }
        let done = self.rig.engine.shrink(next, Bytes(budget));
        if fault {
            self.rig.device.reset();
        }
        match done {
            // Nothing was changed: what is in use would not be together.
            Err(EngineError::Conflict { .. }) => return Ok(()),
            Err(error) => {
                self.spoilt = self.rig.engine.report().recovery_pending;
                self.budget = self.rig.engine.coming_limit().0;
                return Err(error.into());
            }
            Ok(()) => {}
        }
        self.budget = budget;
        self.tally.shrinks += 1;
        self.copies_before = self.rig.engine.stats().copies;
        self.check_pages()
    }
}
