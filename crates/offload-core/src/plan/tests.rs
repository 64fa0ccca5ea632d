//! The planner's clock against the shipping schedule's: a placement is chosen by a time that a step then really takes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use gpu_driver::Bytes;

use super::estimate::Pattern;
use super::ground::{Ground, Sequence};
use super::ring::{Placement, Turns};
use super::spread::{Spread, Weights, heads};
use super::{Plan, PlanRequest, build};
use crate::layout::{Layout, LayoutOptions};
use crate::model::{BlockDesc, ModelDesc, TensorId, TowerDesc, UnitId};
use crate::simulate::{COPY_LATENCY, Workload, simulate};
use crate::units::Units;

/// A random number generator of one line (xorshift), so that every run draws the same.
struct Draw(u64);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Two towers of blocks of one tensor each, of unlike sizes.
fn layout(draw: &mut Draw) -> Layout {
    let mut tensors = Vec::new();
    let mut towers = Vec::new();
    for name in ["a", "b"] {
        let size = 40_000 + draw.below(900_000);
        let blocks = (0..3 + draw.below(12)).map(|number| {
            tensors.push(Bytes(size + draw.below(3) * 70_000));
            BlockDesc { name: format!("{name}.{number}"), tensors: vec![TensorId(tensors.len() as u32 - 1)] }
        });
        let blocks = blocks.collect();
        towers.push(TowerDesc { name: name.to_owned(), blocks });
    }
    let options = LayoutOptions { granularity: Bytes::kib(64), granule: None };
    Layout::new(&ModelDesc { tensors, base: Vec::new(), towers }, &options).unwrap()
}

/// Up to two visits a unit, of any.
fn random_order(draw: &mut Draw, units: u64) -> Vec<UnitId> {
    let visits = 2 + draw.below(2 * units);
    (0..visits).map(|_| UnitId(draw.below(units) as u32)).collect()
}

/// The time of a plan as the planner saw it.
fn estimated(layout: &Layout, units: &Units, plan: &Plan, compute: &[f64], rate: f64) -> f64 {
    let ground = Ground::new(layout, units, Sequence::Visits);
    let placement = Placement {
        ring: plan.ring_granules,
        backing: plan.backing.clone(),
        streamed: plan.units.iter().map(|unit| unit.streamed.clone()).collect(),
    };
    Pattern::new(&ground, &placement, &plan.order, plan.look_ahead).step_seconds(compute, rate)
}

#[test]
fn the_planner_expects_what_the_schedule_does() {
    let mut draw = Draw(0x2545_F491_4F6C_DD1D);
    let mut compared = 0;
    for _ in 0..400 {
        let layout = layout(&mut draw);
        let mut units = Units::whole_blocks(&layout);
        let count = units.units.len() as u64;
        match draw.below(4) {
            // As described; with a unit visited again; in any order with repeats and skips.
            0 | 1 => {}
            2 => units.order.push(UnitId(draw.below(count) as u32)),
            _ => units.order = random_order(&mut draw, count),
        }
        let rate = 2e9;
        let compute: Vec<f64> = units.order.iter().map(|_| draw.below(400) as f64 * 1e-6).collect();
        let line = u64::from(layout.granules()) * layout.granule().0;
        let budget = Some(Bytes(line / 5 + draw.below(line)));
        let look_ahead = Some(draw.below(4) as u32).filter(|&asked| asked < 3);
        let request = PlanRequest {
            budget,
            look_ahead,
            compute: Some(compute.clone()),
            link_bytes_per_second: rate,
            within: None,
        };
        let Ok(plan) = build::build(&layout, &units, &request) else { continue };
        let workload =
            Workload { compute: compute.clone(), link_bytes_per_second: rate, copy_latency: COPY_LATENCY };
        let simulated = simulate(&plan, &workload).unwrap().step_seconds;
        let estimated = estimated(&layout, &units, &plan, &compute, rate);
        assert!(
            (simulated - estimated).abs() <= 0.01 * simulated,
            "simulated {simulated}, estimated {estimated}, look-ahead {}, {:?}",
            plan.look_ahead,
            plan.order
        );
        compared += u32::from(plan.ring_granules > 0);
    }
    assert!(compared >= 200, "only {compared} plans streamed");
}

#[test]
fn timing_without_placing_is_the_same() {
    let mut draw = Draw(0x9E37_79B9_7F4A_7C15);
    let (mut compared, mut unlike) = (0, 0);
    for _ in 0..8_000 {
        let layout = layout(&mut draw);
        let units = Units::whole_blocks(&layout);
        let ground = Ground::new(&layout, &units, Sequence::Visits);
        let ring = 1 + draw.below(u64::from(ground.line_granules()) / 4) as u32;
        let own = draw.below(u64::from(ground.line_granules())) as u32;
        let turns = if draw.below(2) == 0 { Turns::Even } else { Turns::Full };
        let Some(turn) = turns.shortest(ground.line_granules() - own, ring) else { continue };
        let cap = turn * ground.granule / (1 + draw.below(2));
        let least_copy = draw.below(2) * cap;
        let spread = Spread { own, cap, least_copy, weights: &Weights::Bytes };
        let Some(heads) = heads(&ground, &spread) else { continue };
        let order = &units.order;
        let look_ahead = draw.below(5) as u32;
        let Some(fast) = Pattern::in_sequence(&ground, &heads, (ring, turns), order, look_ahead) else {
            continue;
        };
        let placement = Placement::new(&ground, &heads, ring, turns);
        let slow = Pattern::new(&ground, &placement, order, look_ahead);
        for intensity in [0, 50, 200, 1000] {
            let compute: Vec<f64> =
                order.iter().map(|_| (draw.below(100) * intensity) as f64 * 1e-8).collect();
            let (fast, slow) = (fast.step_seconds(&compute, 2e9), slow.step_seconds(&compute, 2e9));
            // Never better than in truth. Worse only by copies that fit where a tower's last granule is not full: such
            // a unit waits for nobody, or is still there.
            let copy = COPY_LATENCY + ground.granule as f64 / 2e9;
            let off = fast - slow;
            assert!(
                (-1e-12..2.0 * copy).contains(&off),
                "{fast}, {slow}: {ring} pages, {turns:?}, {heads:?}"
            );
            unlike += u32::from(off > 1e-9 * slow);
        }
        compared += 1;
    }
    assert!(compared >= 200, "only {compared} placements were compared");
    assert!(unlike * 100 <= compared * 4, "{unlike} of {compared} times four were unlike");
}
