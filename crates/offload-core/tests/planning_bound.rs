//! How close a step comes to what no schedule of the same plan can beat, over random models of several unlike towers.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod models;

use gpu_driver::Bytes;
use models::{Builder, finest, layout};
use offload_core::{COPY_LATENCY, Plan, PlanRequest, SegmentedPlan, UnitDesc, Workload, simulate};
use proptest::prelude::*;

/// A tower of blocks of tensors.
#[derive(Debug, Clone)]
struct Tower {
    blocks: usize,
    tensors: Vec<u64>,
    /// Compute of a block as a part of the time to copy it whole.
    intensity: f64,
}

/// A number between `low` and `high`, each order of magnitude as likely.
fn magnitude(low: f64, high: f64) -> impl Strategy<Value = f64> {
    (low.ln()..high.ln()).prop_map(f64::exp)
}

fn tower() -> impl Strategy<Value = Tower> {
    (6..36_usize, magnitude(20e6, 700e6), prop::collection::vec(1..9_u64, 3..10), magnitude(0.02, 5.0))
        .prop_map(|(blocks, bytes, parts, intensity)| {
            #[allow(clippy::cast_sign_loss, reason = "a size is not negative")]
            let bytes = bytes as u64;
            let all: u64 = parts.iter().sum();
            Tower { blocks, tensors: parts.iter().map(|part| bytes * part / all).collect(), intensity }
        })
}

/// The time that no schedule of this plan can beat: all compute; all copies; and for any run of visits, its copies but for
/// what the ring may hold of them before the run begins, and the compute of all others. A copy's time on the link is that
/// of its bytes and its latency.
fn bound(plan: &Plan, workload: &Workload) -> f64 {
    let rate = workload.link_bytes_per_second;
    let copy = |bytes: u64| if bytes == 0 { 0.0 } else { workload.copy_latency + bytes as f64 / rate };
    let copies: Vec<f64> =
        plan.order.iter().map(|u| copy(plan.unit(*u).unwrap().streamed_bytes().0)).collect();
    let compute: f64 = workload.compute.iter().sum();
    let ring = plan.ring_bytes().0 as f64 / rate;
    let mut bound = compute.max(copies.iter().sum());
    let visits = copies.len();
    for first in 0..visits {
        let mut gain = 0.0;
        for visit in (first..first + visits).map(|visit| visit % visits) {
            gain += copies[visit] - workload.compute[visit];
            bound = bound.max(gain - ring + compute);
        }
    }
    bound
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 100,
        failure_persistence: None,
        rng_seed: prop::test_runner::RngSeed::Fixed(12),
        ..ProptestConfig::default()
    })]

    #[test]
    fn steps_come_within_a_twentieth_of_the_bound(
        towers in prop::collection::vec(tower(), 2..5),
        part in 0.0..1.0,
        balance in magnitude(0.3, 3.0),
    ) {
        let rate = 55.3e9;
        let mut model = Builder::default().base(&[1 << 20]);
        for (number, tower) in towers.iter().enumerate() {
            model = model.tower(&format!("tower {number}"), tower.blocks, &tower.tensors);
        }
        let layout = layout(&model.build(), 2 << 20);
        let finest = finest(&layout);
        let size = |unit: &UnitDesc| (unit.span.end - unit.span.start) as f64;
        let all: f64 = finest.units.iter().map(size).sum();
        // From room for four of the largest tensors up to 40 granules below the whole model: with less to copy, a page more
        // in the ring costs more than it hides, and the best ring holds one granule at a time.
        let most = all - 40.0 * layout.granule().0 as f64;
        let least = 5.0 * finest.units.iter().map(size).fold(0.0, f64::max) + 8e6;
        #[allow(clippy::cast_sign_loss, reason = "a size is not negative")]
        let budget = (least + part * (most - least).max(0.0)) as u64;
        // Compute in the order of what has to be copied at least.
        let lacking = (1.0 - budget as f64 / all).max(0.02) * balance;
        let intensity = |unit: &UnitDesc| towers[layout.block(unit.block).unwrap().tower as usize].intensity;
        let seconds = |unit: &UnitDesc| size(unit) / rate * intensity(unit) * lacking;
        let compute = finest.units.iter().map(seconds).collect();
        let request = PlanRequest {
            budget: Some(Bytes(budget)),
            look_ahead: None,
            compute: Some(compute),
            link_bytes_per_second: rate,
            within: None,
        };
        let chosen = SegmentedPlan::new(&layout, &finest, &request).unwrap();
        let compute = chosen.units.units.iter().map(seconds).collect();
        let workload = Workload { compute, link_bytes_per_second: rate, copy_latency: COPY_LATENCY };
        let step = simulate(&chosen.plan, &workload).unwrap();
        let bound = bound(&chosen.plan, &workload);
        prop_assert!(step.step_seconds <= 1.05 * bound, "{} of {bound}", step.step_seconds);
        prop_assert!(step.step_seconds >= 0.999_999 * step.compute_seconds.max(step.link_seconds));
        let stalled: f64 = step.stalls.iter().map(|stall| stall.seconds).sum();
        prop_assert!((step.compute_seconds + stalled - step.step_seconds).abs() <= 1e-6 * step.step_seconds);
    }
}
