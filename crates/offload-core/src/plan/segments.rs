//! Into how many segments to cut the blocks: enough to make the ring small, not so many that starting copies costs more.
//!
//! The candidates are the finest units that keep the order: each cut of them may be used or not. Using all is rarely best:
//! a smaller unit needs a smaller ring, which leaves room for residents and so streams less, but every copy costs its
//! latency. No rule of thumb finds the optimum on both a link of 55 GB/s with blocks of 700 MB and one of 7 MB blocks, so a few
//! sizes are planned and simulated, whole blocks among them.

use std::collections::BTreeMap;

use gpu_driver::Bytes;

use super::build::compute_cases;
use super::{Plan, PlanError, PlanRequest};
use crate::layout::Layout;
use crate::model::{BlockId, UnitId};
use crate::simulate::{COPY_LATENCY, Workload, simulate};
use crate::units::Units;

/// A copy of this size loses 3 % to its latency at 55 GB/s, and less on a slower link: no segment is made smaller …
const SMALLEST_SEGMENT: Bytes = Bytes::mib(16);

/// … unless the budget is so small that this part of it is less: the ring must not take all of it.
const SMALLEST_PART_OF_BUDGET: u64 = 64;

/// More segments cost the host more calls: they must save at least a thousandth of the step.
const WORTH: f64 = 0.999;

/// The part of a copy's time that counts even where compute hides it: at 16,384 tokens on an H200, whose power is capped, 24
/// units that stream 8 % more than 240 took 1.017 of the resident step, those 1.012, although they never wait for a copy.
const HIDDEN: f64 = 0.1;

/// In how many parts the largest block is cut at most, by candidate. Between neighbours the ring changes by a third or less.
const PARTS: [u64; 9] = [1, 2, 3, 4, 6, 8, 12, 16, 24];

/// Units and the plan made for them.
#[derive(Debug, Clone, PartialEq)]
pub struct SegmentedPlan {
    /// The units chosen, whole blocks where cutting does not pay.
    pub units: Units,
    /// Their plan.
    pub plan: Plan,
    /// The predicted seconds of a step; without compute times, the mean of what is assumed of them.
    pub step_seconds: f64,
}

impl SegmentedPlan {
    /// Chooses which cuts of `finest` to use and plans the result. The request's compute times are those of the visits
    /// of `finest`, whose segments must not overlap in time.
    ///
    /// # Errors
    /// As [`Plan::new`]; a budget is too small only if not even the finest segments fit.
    pub fn new(layout: &Layout, finest: &Units, request: &PlanRequest) -> Result<Self, PlanError> {
        finest.check(layout)?;
        super::build::check_request(finest, request)?;
        let largest =
            layout.blocks().iter().map(|block| block.span.end - block.span.start).max().unwrap_or(0);
        let budget = request.budget.map_or(u64::MAX, |budget| budget.0);
        let smallest = SMALLEST_SEGMENT.0.min(budget / SMALLEST_PART_OF_BUDGET);
        let seconds = |bytes: Bytes| bytes.0 as f64 / request.link_bytes_per_second;
        let cost = |it: &Self| it.step_seconds + HIDDEN * seconds(it.plan.streamed_bytes_per_step());
        let mut best: Option<Self> = None;
        let mut refusal = None;
        let mut seen = Vec::new();
        for parts in PARTS {
            let size = (largest.div_ceil(parts)).max(smallest);
            let units = cut(layout, finest, size)?;
            if seen.contains(&units.units.len()) {
                continue;
            }
            seen.push(units.units.len());
            match Self::of(layout, finest, units, request) {
                Ok(plan) if best.as_ref().is_none_or(|best| cost(&plan) < cost(best) * WORTH) => {
                    best = Some(plan);
                }
                Ok(_) => {}
                Err(error @ PlanError::BudgetTooSmall { .. }) => refusal = Some(error),
                Err(error) => return Err(error),
            }
        }
        if let Some(best) = best {
            return Ok(best);
        }
        // Nothing of a sensible size fits: the finest segments are the last resort, and their refusal the smallest.
        Self::of(layout, finest, finest.clone(), request).map_err(|error| match error {
            PlanError::BudgetTooSmall { .. } => error,
            other => refusal.unwrap_or(other),
        })
    }

    fn of(
        layout: &Layout,
        finest: &Units,
        mut units: Units,
        request: &PlanRequest,
    ) -> Result<Self, PlanError> {
        let (order, compute) = merge_visits(finest, &units, request.compute.as_deref());
        units.order = order;
        let request = PlanRequest { compute, ..request.clone() };
        let plan = Plan::new(layout, &units, &request)?;
        let cases = compute_cases(layout, &units, &request);
        let count = cases.len() as f64;
        let mut step_seconds = 0.0;
        for compute in cases {
            let link_bytes_per_second = request.link_bytes_per_second;
            let workload = Workload { compute, link_bytes_per_second, copy_latency: COPY_LATENCY };
            step_seconds += simulate(&plan, &workload)?.step_seconds / count;
        }
        Ok(Self { units, plan, step_seconds })
    }
}

/// The finest units merged so that segments of a block are of about `size` or one finest segment.
fn cut(layout: &Layout, finest: &Units, size: u64) -> Result<Units, PlanError> {
    let mut cuts = BTreeMap::new();
    for (number, block) in layout.blocks().iter().enumerate() {
        let id = BlockId(number as u32);
        let ends: Vec<u64> =
            finest.units.iter().filter(|unit| unit.block == id).map(|unit| unit.span.end).collect();
        let parts = (block.span.end - block.span.start).div_ceil(size.max(1)).max(1);
        cuts.insert(id, even_cuts(block.span.start, &ends, parts));
    }
    Units::segmented(layout, &cuts, None)
}

/// Of the ends of consecutive segments, those at which to cut so that at most `parts` parts are as even as they can be.
fn even_cuts(start: u64, ends: &[u64], parts: u64) -> Vec<u64> {
    let fits = |size: u64| {
        let mut cuts = Vec::new();
        let (mut part_start, mut before) = (start, start);
        for &end in ends {
            if end - part_start > size && before > part_start {
                cuts.push(before);
                part_start = before;
            }
            before = end;
        }
        cuts
    };
    let end = ends.last().copied().unwrap_or(start);
    // The smallest size that needs no more parts; a single segment may exceed it.
    let (mut low, mut high) = ((end - start) / parts.max(1), end - start);
    while low < high {
        let middle = u64::midpoint(low, high);
        if (fits(middle).len() as u64) < parts { high = middle } else { low = middle + 1 }
    }
    fits(high)
}

/// The visits of merged units: consecutive visits of segments of one unit become one, and their compute adds up.
fn merge_visits(finest: &Units, merged: &Units, compute: Option<&[f64]>) -> (Vec<UnitId>, Option<Vec<f64>>) {
    let mut owner = Vec::with_capacity(finest.units.len());
    let mut unit = 0;
    for segment in &finest.units {
        while merged.units[unit].block != segment.block || merged.units[unit].span.end < segment.span.end {
            unit += 1;
        }
        owner.push(UnitId(unit as u32));
    }
    let mut order: Vec<UnitId> = Vec::new();
    let mut seconds: Vec<f64> = Vec::new();
    let mut visited = Vec::new();
    for (visit, segment) in finest.order.iter().enumerate() {
        let unit = owner[segment.0 as usize];
        let took = compute.map_or(0.0, |compute| compute[visit]);
        // A segment that comes again begins another visit of its unit.
        let same = order.last() == Some(&unit) && !visited.contains(segment);
        match seconds.last_mut() {
            Some(last) if same => *last += took,
            _ => {
                order.push(unit);
                seconds.push(took);
                visited.clear();
            }
        }
        visited.push(*segment);
    }
    (order, compute.map(|_| seconds))
}
