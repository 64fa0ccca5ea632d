//! How the blocks of a model that is being streamed are cut into units, and what its steps were measured to take.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::PoisonError;

use offload_core::{BlockId, TensorId, UnitDesc, UnitId, Units};

use crate::error::Result;
use crate::offloader::Offloader;
use crate::pace::{Gain, Pace};
use crate::step_trace::step_report;

impl Offloader {
    /// Cuts blocks into segments, between steps, where that makes a step faster. For a block, `cuts` names the tensors at
    /// which a segment may start; a block that is not named stays whole. `order` is the expected order of visits of the
    /// segments that all cuts together would make, numbered block by block in address order; that order if not given.
    ///
    /// Gives, for each of those segments, the unit it is part of from now on: not every cut is worth its copies.
    ///
    /// # Errors
    /// A tensor that is not of the block or not on the line; a step under way. Nothing changes then.
    pub fn segment(
        &self,
        cuts: &BTreeMap<BlockId, Vec<TensorId>>,
        order: Option<Vec<UnitId>>,
    ) -> Result<Vec<UnitId>> {
        let finest = self.finest(cuts, order)?;
        let chosen = self.request().plan_segments(self.engine.layout(), &finest, self.pace().as_ref())?;
        let holds = |part: &UnitDesc, unit: &UnitDesc| {
            unit.block == part.block && unit.span.start <= part.span.start && part.span.end <= unit.span.end
        };
        let unit_of = |part| chosen.units.units.iter().position(|unit| holds(part, unit)).unwrap_or_default();
        let units = finest.units.iter().map(|part| UnitId(unit_of(part) as u32)).collect();
        self.replan(chosen.plan)?;
        Ok(units)
    }

    /// The seconds that a step is predicted to take with what [`segment`](Self::segment) would choose: for comparing cuts.
    /// Before [`learn_pace`](Self::learn_pace) has learnt something, only the ratio of two predictions means something.
    ///
    /// # Errors
    /// As [`segment`](Self::segment), a step under way aside.
    pub fn predict(
        &self,
        cuts: &BTreeMap<BlockId, Vec<TensorId>>,
        order: Option<Vec<UnitId>>,
    ) -> Result<f64> {
        let finest = self.finest(cuts, order)?;
        Ok(self.request().plan_segments(self.engine.layout(), &finest, self.pace().as_ref())?.step_seconds)
    }

    /// Measures the next step that begins: what each of its visits computes. Costs two events a visit, in that step.
    pub fn time_next_step(&self) {
        self.engine.time_next_step();
    }

    /// Takes what was measured, if the device has come to its end: whether there is something new that
    /// [`segment`](Self::segment) and [`predict`](Self::predict) go by from now on. Never blocks.
    pub fn learn_pace(&self) -> bool {
        let Some(times) = self.engine.take_step_times() else { return false };
        let learnt = Pace::new(&self.engine.plan(), &times, self.engine.link_rate());
        let is_new = learnt.is_some();
        if is_new {
            *self.pace.lock().unwrap_or_else(PoisonError::into_inner) = learnt;
        }
        is_new
    }

    /// What [`segment`](Self::segment) with these cuts would bring over the plan in place; `None` if nothing was measured
    /// of this plan and order.
    ///
    /// # Errors
    /// As [`predict`](Self::predict).
    pub fn gain(
        &self,
        cuts: &BTreeMap<BlockId, Vec<TensorId>>,
        order: Option<Vec<UnitId>>,
    ) -> Result<Option<Gain>> {
        let (finest, pace) = (self.finest(cuts, order)?, self.pace());
        let Some(pace) = pace.filter(|pace| pace.compute_of(&finest).is_some()) else { return Ok(None) };
        let then = self.request().plan_segments(self.engine.layout(), &finest, Some(&pace))?;
        pace.gain(&self.engine.plan(), &then).map(Some)
    }

    /// Traces the next step that begins: costs two events a visit and a copy, in that step.
    pub fn trace_next_step(&self) {
        self.engine.trace_next_step();
    }

    /// The step that was traced, as a report like those of startup timings, if the device has come to its end; once. Never
    /// blocks.
    ///
    /// The phase `step` contains the visits, on the lane of the compute stream, and the copies, on that of the copy stream;
    /// a visit that waited for its copy contains the phase `wait`.
    pub fn take_step_trace(&self) -> Option<startup_timing::Report> {
        step_report(&self.engine.plan(), &self.engine.take_step_trace()?)
    }

    pub(crate) fn pace(&self) -> Option<Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// As [`segment`](Self::segment), but at every cut, worth its copies or not: for callers that chose themselves.
    ///
    /// # Errors
    /// As [`segment`](Self::segment).
    pub fn segment_everywhere(
        &self,
        cuts: &BTreeMap<BlockId, Vec<TensorId>>,
        order: Option<Vec<UnitId>>,
    ) -> Result<Vec<UnitId>> {
        let finest = self.finest(cuts, order)?;
        let plan = self.request().plan(self.engine.layout(), &finest)?;
        self.replan(plan)?;
        Ok((0..finest.units.len() as u32).map(UnitId).collect())
    }

    fn finest(&self, cuts: &BTreeMap<BlockId, Vec<TensorId>>, order: Option<Vec<UnitId>>) -> Result<Units> {
        let mut offsets = BTreeMap::new();
        for (&block, tensors) in cuts {
            for &tensor in tensors {
                self.check(tensor)?;
                offsets.entry(block).or_insert_with(Vec::new).push(self.engine.layout().offset(tensor));
            }
        }
        Ok(Units::segmented(self.engine.layout(), &offsets, order)?)
    }
}
