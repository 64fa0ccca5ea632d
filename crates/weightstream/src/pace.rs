//! What a step was measured to take, as what another plan may count on.
#![forbid(unsafe_code)]

use std::ops::Range;

use offload_core::{
    Backing, COPY_LATENCY, Plan, SegmentedPlan, StepTimes, UnitDesc, Units, Workload, simulate,
};

use crate::error::Result;

/// The compute of one step, stretch by stretch of the line, and the link's rate.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Pace {
    /// In the order of the visits: the bytes of the unit visited, and its seconds.
    visits: Vec<(Range<u64>, f64)>,
    pub(crate) link_bytes_per_second: f64,
}

/// What planning again would bring, by what was measured. All in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gain {
    /// A step with the plan in place.
    pub now: f64,
    /// A step with the plan that would replace it.
    pub then: f64,
    /// What putting it in place takes, once: resident bytes that are not there yet.
    pub switch: f64,
}

impl Pace {
    /// The pace of a step that made just the visits its plan expects; `None` of any other step, or if the link's rate is
    /// not known: compute means something only beside it.
    pub(crate) fn new(plan: &Plan, times: &StepTimes, link: Option<f64>) -> Option<Self> {
        let link_bytes_per_second = link?;
        if !times.visits.iter().map(|(unit, _)| unit).eq(&plan.order) {
            return None;
        }
        let span = |&(unit, seconds)| plan.unit(unit).map(|unit| (unit.span.clone(), seconds));
        let visits = times.visits.iter().map(span).collect::<Option<_>>()?;
        Some(Self { visits, link_bytes_per_second })
    }

    /// The seconds of each visit of `finest`: those of the visit it was part of, shared out by bytes. `None` if its order is
    /// not that of what was measured.
    pub(crate) fn compute_of(&self, finest: &Units) -> Option<Vec<f64>> {
        let within = |part: &UnitDesc, whole: &Range<u64>| {
            whole.start <= part.span.start && part.span.end <= whole.end
        };
        let mut visits = self.visits.iter().peekable();
        let mut compute = Vec::with_capacity(finest.order.len());
        let mut left = 0;
        for (place, &unit) in finest.order.iter().enumerate() {
            let part = finest.units.get(unit.0 as usize)?;
            if left == 0 {
                // As many parts as follow one another inside the unit that was visited.
                let (whole, _) = visits.peek()?;
                let inside = finest.order[place..].iter().take_while(|other| {
                    finest.units.get(other.0 as usize).is_some_and(|other| within(other, whole))
                });
                left = parts_of_one_visit(inside.map(|unit| unit.0));
            }
            let (whole, seconds) = visits.peek()?;
            if left == 0 || !within(part, whole) {
                return None;
            }
            let bytes = (whole.end - whole.start).max(1) as f64;
            compute.push(seconds * (part.span.end - part.span.start) as f64 / bytes);
            left -= 1;
            if left == 0 {
                visits.next();
            }
        }
        visits.next().is_none().then_some(compute)
    }

    /// What a plan that may replace another would bring.
    pub(crate) fn gain(&self, now: &Plan, then: &SegmentedPlan) -> Result<Gain> {
        let workload = Workload {
            compute: self.visits.iter().map(|(_, seconds)| *seconds).collect(),
            link_bytes_per_second: self.link_bytes_per_second,
            copy_latency: COPY_LATENCY,
        };
        let uploads = then.plan.backing.iter().zip(&now.backing);
        let own = |backing: &Backing| *backing == Backing::Own;
        let granules = uploads.filter(|(new, old)| own(new) && !own(old)).count();
        Ok(Gain {
            now: simulate(now, &workload)?.step_seconds,
            then: then.step_seconds,
            switch: (granules as u64 * now.granule.0) as f64 / self.link_bytes_per_second,
        })
    }
}

/// The parts at the front that rise: a step back begins the unit's next visit.
fn parts_of_one_visit(parts: impl Iterator<Item = u32>) -> usize {
    let mut last = None;
    parts.take_while(|&part| last.replace(part).is_none_or(|before| before < part)).count()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use offload_core::{BlockId, UnitId};

    use super::*;

    /// Units over the given spans, visited in the given order.
    fn units(spans: &[Range<u64>], order: &[u32]) -> Units {
        let unit = |(number, span): (usize, &Range<u64>)| UnitDesc {
            block: BlockId(0),
            span: span.clone(),
            name: format!("part {number}"),
        };
        Units {
            units: spans.iter().enumerate().map(unit).collect(),
            order: order.iter().copied().map(UnitId).collect(),
        }
    }

    fn pace(visits: &[(Range<u64>, f64)]) -> Pace {
        Pace { visits: visits.to_vec(), link_bytes_per_second: 1e9 }
    }

    #[test]
    fn a_visit_is_shared_out_by_bytes() {
        let finest = units(&[0..30, 30..40, 40..80], &[0, 1, 2]);
        let compute = pace(&[(0..40, 4.0), (40..80, 1.0)]).compute_of(&finest).unwrap();
        assert_eq!(compute, [3.0, 1.0, 1.0]);
    }

    #[test]
    fn a_unit_visited_twice_in_a_row_has_two_shares() {
        let finest = units(&[0..30, 30..40], &[0, 1, 0, 1]);
        let compute = pace(&[(0..40, 4.0), (0..40, 8.0)]).compute_of(&finest).unwrap();
        assert_eq!(compute, [3.0, 1.0, 6.0, 2.0]);
    }

    #[test]
    fn another_order_has_no_shares() {
        let measured = pace(&[(0..40, 4.0), (40..80, 1.0)]);
        for order in [&[2, 0, 1][..], &[0, 1], &[0, 1, 2, 2], &[]] {
            let finest = units(&[0..30, 30..40, 40..80], order);
            assert_eq!(measured.compute_of(&finest), None, "{order:?}");
        }
        assert_eq!(measured.compute_of(&units(&[0..50, 50..80], &[0, 1])), None, "a part of two units");
    }
}
