//! The same request, planned again whenever the units change.
#![forbid(unsafe_code)]

use gpu_driver::Bytes;
use offload_core::{Layout, Plan, PlanRequest, SegmentedPlan, Units};

use crate::error::Result;

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

    pub(crate) fn plan_segments(self, layout: &Layout, finest: &Units) -> Result<SegmentedPlan> {
        Ok(SegmentedPlan::new(layout, finest, &self.request())?)
    }

    fn request(self) -> PlanRequest {
        PlanRequest { budget: self.limit, look_ahead: self.look_ahead, ..PlanRequest::default() }
    }
}
