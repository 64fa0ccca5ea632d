//! A traced step as a report: the same trees, exports and comparisons as for startup timings.
#![forbid(unsafe_code)]

use offload_core::{Plan, StepTrace, UnitId};
use startup_timing::{Report, TraceBuilder};

/// Where visits are drawn, and copies.
const COMPUTE: &str = "compute stream";
const COPIES: &str = "copy stream";
/// Waits below this are two events one after the other.
const LEAST_WAIT: u64 = 10_000;

/// The report of a step; `None` if a visit or copy is not of the plan, or there are more than a report holds.
pub(crate) fn step_report(plan: &Plan, trace: &StepTrace) -> Option<Report> {
    let mut builder = TraceBuilder::new("device");
    // Copies that were submitted in the step may end after it.
    let ends = trace.copies.iter().map(|copy| copy.end).chain([trace.seconds]);
    let end = nanoseconds(ends.fold(0.0, f64::max));
    let step = builder.phase(None, COMPUTE, "step", 0, end).ok()?;
    let name = |unit: UnitId| plan.unit(unit).map(|unit| unit.name.as_str());
    for visit in &trace.visits {
        let [reached, free, left] = [visit.reached, visit.free, visit.end].map(|at| nanoseconds(at).min(end));
        let length = left.saturating_sub(reached);
        let phase = builder.phase(Some(step), COMPUTE, name(visit.unit)?, reached, length).ok()?;
        let wait = free.saturating_sub(reached).min(length);
        if wait >= LEAST_WAIT {
            builder.phase(Some(phase), COMPUTE, "wait", reached, wait).ok()?;
        }
    }
    for copy in &trace.copies {
        let (start, ended) = (nanoseconds(copy.start).min(end), nanoseconds(copy.end).min(end));
        let name = format!("copy {}", name(copy.unit)?);
        let phase = builder.phase(Some(step), COPIES, &name, start, ended.saturating_sub(start)).ok()?;
        builder.count(phase, "bytes", i64::try_from(copy.bytes).ok()?).ok()?;
    }
    builder.fact("clock", "the device's");
    builder.fact("step_seconds", trace.seconds);
    Some(builder.finish())
}

fn nanoseconds(seconds: f64) -> u64 {
    #[expect(clippy::cast_sign_loss, reason = "made no less than 0")]
    let nanoseconds = (seconds.max(0.0) * 1e9).round() as u64;
    nanoseconds
}
