//! The same request, planned again whenever the units change.
#![forbid(unsafe_code)]

use gpu_driver::Bytes;
use offload_core::{Layout, Plan, PlanRequest, SegmentedPlan, Units};

use crate::error::Result;
use crate::pace::Pace;

/// What every plan of one model is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Request {
    pub(crate) limit: Option<Bytes>,
    /// What of the limit is the budget that was set; the rest is preloaded and may be given back.
    pub(crate) floor: Option<Bytes>,
    pub(crate) look_ahead: Option<u32>,
}

impl Request {
    pub(crate) fn plan(self, layout: &Layout, units: &Units) -> Result<Plan> {
        Ok(Plan::new(layout, units, &self.request())?)
    }

    /// Refuses a budget that is too small for whole blocks, which every model may come back to.
    pub(crate) fn check(self, layout: &Layout) -> Result<()> {
        match self.limit {
            Some(limit) => Ok(Plan::check_budget(layout, &Units::whole_blocks(layout), limit)?),
            None => Ok(()),
        }
    }

    /// Plans the units of `now` again. Nothing new becomes resident if that one may take more.
    pub(crate) fn plan_again(
        self,
        layout: &Layout,
        now: &Plan,
        pace: Option<&Pace>,
        lower: bool,
    ) -> Result<Plan> {
        let units = now.described_units();
        let mut request = self.measured(&units, pace);
        request.within = lower.then(|| now.backing.clone());
        Ok(Plan::new(layout, &units, &request)?)
    }

    /// Plans the cuts of `finest`, by what was measured if that is of the same order.
    pub(crate) fn plan_segments(
        self,
        layout: &Layout,
        finest: &Units,
        pace: Option<&Pace>,
    ) -> Result<SegmentedPlan> {
        Ok(SegmentedPlan::new(layout, finest, &self.measured(finest, pace))?)
    }

    /// The request, by what was measured of these units if anything was.
    fn measured(self, units: &Units, pace: Option<&Pace>) -> PlanRequest {
        let mut request = self.request();
        if let Some((pace, compute)) = pace.and_then(|pace| Some((pace, pace.compute_of(units)?))) {
            request.compute = Some(compute);
            request.link_bytes_per_second = pace.link_bytes_per_second;
        }
        request
    }

    fn request(self) -> PlanRequest {
        PlanRequest { budget: self.limit, look_ahead: self.look_ahead, ..PlanRequest::default() }
    }
}
