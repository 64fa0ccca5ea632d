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
    pub(crate) look_ahead: Option<u32>,
}

impl Request {
    pub(crate) fn plan(self, layout: &Layout, units: &Units) -> Result<Plan> {
        Ok(Plan::new(layout, units, &self.request())?)
    }

    /// Plans the cuts of `finest`, by what was measured if that is of the same order.
    pub(crate) fn plan_segments(
        self,
        layout: &Layout,
        finest: &Units,
        pace: Option<&Pace>,
    ) -> Result<SegmentedPlan> {
        let mut request = self.request();
        if let Some((pace, compute)) = pace.and_then(|pace| Some((pace, pace.compute_of(finest)?))) {
            request.compute = Some(compute);
            request.link_bytes_per_second = pace.link_bytes_per_second;
        }
        Ok(SegmentedPlan::new(layout, finest, &request)?)
    }

    fn request(self) -> PlanRequest {
        PlanRequest { budget: self.limit, look_ahead: self.look_ahead, ..PlanRequest::default() }
    }
}
