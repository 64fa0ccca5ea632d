//! Plans of real models' shapes: what fits in which budget, and how long a step takes.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod models;

use std::collections::BTreeMap;

use gpu_driver::Bytes;
use models::{dit, finest, layout, minilm, smollm2};
use offload_core::{
    BlockId, COPY_LATENCY, Layout, Plan, PlanNote, PlanRequest, SegmentedPlan, Units, Workload, simulate,
};

const KIB_64: u64 = 64 << 10;
const MIB_2: u64 = 2 << 20;

/// `PCIe` 5 x16, pinned memory to device.
const LINK: f64 = 55.3e9;

fn request(budget: u64) -> PlanRequest {
    PlanRequest { budget: Some(Bytes(budget)), link_bytes_per_second: LINK, ..PlanRequest::default() }
}

fn planned(layout: &Layout, units: &Units, request: &PlanRequest) -> Plan {
    let plan = Plan::new(layout, units, request).unwrap();
    plan.check(layout).unwrap();
    let budget = request.budget.unwrap();
    assert!(plan.physical_bytes() <= budget, "{:?} of {budget:?}", plan.physical_bytes());
    assert!(plan.physical_bytes() + plan.granule > budget, "{:?} of {budget:?}", plan.physical_bytes());
    plan
}

fn one_slot(plan: &Plan) -> bool {
    plan.notes.iter().any(|note| matches!(note, PlanNote::OneSlot { .. }))
}

#[test]
fn a_budget_that_a_note_names_is_more_than_the_one_given() {
    let (mut named, mut chosen) = (0, 0);
    for layout in [layout(&smollm2(), KIB_64), layout(&minilm(), KIB_64), layout(&dit(), MIB_2)] {
        let units = Units::whole_blocks(&layout);
        for hundredths in (2..100).step_by(2) {
            let budget = layout.model_bytes().0 * hundredths / 100;
            let Ok(plan) = Plan::new(&layout, &units, &request(budget)) else { continue };
            for note in &plan.notes {
                match note {
                    PlanNote::OneSlot { two_slots: Some(two_slots), .. } => {
                        assert!(two_slots.0 > budget, "{two_slots} named to who gives {}", Bytes(budget));
                        named += 1;
                    }
                    PlanNote::OneSlot { two_slots: None, .. } => chosen += 1,
                    _ => {}
                }
            }
        }
    }
    assert!(
        named > 0 && chosen > 0,
        "{named} budgets are too small for two units, {chosen} do better with one"
    );
}

#[test]
fn smollm2_fits_in_a_quarter_of_its_weights() {
    let layout = layout(&smollm2(), KIB_64);
    assert_eq!(layout.model_bytes(), Bytes(269_030_016));
    let budget = 269_030_016 / 4;
    let whole = planned(&layout, &Units::whole_blocks(&layout), &request(budget));
    assert!(one_slot(&whole), "two blocks of 7 MB do not fit beside 57 MB: {:?}", whole.notes);
    let cuts = cuts_at(&layout, &[4, 5, 6]);
    let segments = planned(&layout, &Units::segmented(&layout, &cuts, None).unwrap(), &request(budget));
    assert!(!one_slot(&segments), "{:?}", segments.notes);
}

#[test]
fn smollm2_fits_in_27_percent_in_granules_of_2_mib() {
    let layout = layout(&smollm2(), MIB_2);
    planned(&layout, &Units::whole_blocks(&layout), &request(269_030_016 * 27 / 100));
}

#[test]
fn minilm_fits_in_two_thirds_of_its_weights() {
    for (granularity, part) in [(KIB_64, 65), (MIB_2, 68)] {
        let layout = layout(&minilm(), granularity);
        assert_eq!(layout.model_bytes(), Bytes(90_852_864));
        planned(&layout, &Units::whole_blocks(&layout), &request(90_852_864 * part / 100));
    }
}

/// Two attentions and two feed-forward matrices a block.
fn dit_segments(layout: &Layout) -> Units {
    Units::segmented(layout, &cuts_at(layout, &[4, 8, 9]), None).unwrap()
}

/// Cuts of each block before the matrices of these numbers.
fn cuts_at(layout: &Layout, matrices: &[usize]) -> BTreeMap<BlockId, Vec<u64>> {
    let blocks = layout.blocks().iter().enumerate().map(|(number, block)| {
        let large = |t: &&_| layout.bytes(**t).0 > 200_000;
        let starts = block.tensors.iter().filter(large).map(|t| layout.offset(*t)).collect::<Vec<_>>();
        (BlockId(number as u32), matrices.iter().map(|&matrix| starts[matrix]).collect())
    });
    blocks.collect()
}

#[test]
fn dit_streams_close_to_the_link_floor() {
    let layout = layout(&dit(), MIB_2);
    let units = dit_segments(&layout);
    for budget in [2_200_000_000, 9_000_000_000] {
        let floor = (layout.model_bytes().0 - budget) as f64 / LINK;
        // The second is what reading the weights once takes on the device.
        for (seconds, limit) in [(1e-6, 1.02), (36e-6, 1.04)] {
            let compute = vec![seconds; units.order.len()];
            let plan =
                planned(&layout, &units, &PlanRequest { compute: Some(compute.clone()), ..request(budget) });
            let workload = Workload { compute, link_bytes_per_second: LINK, copy_latency: COPY_LATENCY };
            let step = simulate(&plan, &workload).unwrap();
            assert!(step.step_seconds <= limit * floor, "{budget}: {} of {floor}", step.step_seconds);
        }
    }
}

#[test]
fn dit_hides_compute_without_being_told_of_it() {
    let layout = layout(&dit(), MIB_2);
    let units = dit_segments(&layout);
    for budget in [2_200_000_000, 9_000_000_000] {
        let floor = (layout.model_bytes().0 - budget) as f64 / LINK;
        let plan = planned(&layout, &units, &request(budget));
        let bytes = |unit: &offload_core::UnitDesc| (unit.span.end - unit.span.start) as f64;
        let all: f64 = units.units.iter().map(bytes).sum();
        for part in [0.05, 0.5, 0.9, 3.0] {
            let compute = units.units.iter().map(|unit| bytes(unit) / all * floor * part).collect();
            let workload = Workload { compute, link_bytes_per_second: LINK, copy_latency: COPY_LATENCY };
            let step = simulate(&plan, &workload).unwrap();
            let ideal = floor * part.max(1.0);
            assert!(step.step_seconds <= 1.05 * ideal, "{budget}, {part}: {} of {ideal}", step.step_seconds);
        }
    }
}

#[test]
fn cuts_are_used_where_they_pay() {
    let layout = layout(&dit(), MIB_2);
    let request = request(2_200_000_000);
    let whole = Units::whole_blocks(&layout);
    let segmented = SegmentedPlan::new(&layout, &finest(&layout), &request).unwrap();
    let alone = SegmentedPlan::new(&layout, &whole, &request).unwrap();
    assert_eq!(alone.units.units.len(), 24);
    assert!(segmented.units.units.len() > 24);
    assert!(segmented.step_seconds < 0.95 * alone.step_seconds);
    // No segment is below 16 MiB, although biases and single matrices could be cut off.
    assert!(segmented.units.units.iter().all(|unit| unit.span.end - unit.span.start >= 16 << 20));
    // Compute of twice the copies hides them in any case: then what counts is to copy less.
    let bytes = |unit: &offload_core::UnitDesc| (unit.span.end - unit.span.start) as f64;
    let slow: Vec<f64> = finest(&layout).units.iter().map(|unit| 2.0 * bytes(unit) / LINK).collect();
    let compute: f64 = slow.iter().sum();
    let hidden =
        SegmentedPlan::new(&layout, &finest(&layout), &PlanRequest { compute: Some(slow), ..request })
            .unwrap();
    assert!(hidden.step_seconds < 1.0001 * compute);
    assert!(hidden.plan.streamed_bytes_per_step().0 * 20 < alone.plan.streamed_bytes_per_step().0 * 19);
}
