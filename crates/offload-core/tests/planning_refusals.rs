//! What cannot be laid out, cut or planned: one typed error each, which says what would do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod models;

use std::collections::BTreeMap;

use gpu_driver::Bytes;
use models::{Builder, layout, smollm2};
use offload_core::{
    BlockId, COPY_LATENCY, Layout, LayoutOptions, ModelDesc, Plan, PlanError, PlanNote, PlanRequest,
    TensorId, UnitId, Units, Workload, simulate,
};

fn options(granularity: u64, granule: Option<u64>) -> LayoutOptions {
    LayoutOptions { granularity: Bytes(granularity), granule: granule.map(Bytes) }
}

fn request(budget: u64) -> PlanRequest {
    PlanRequest { budget: Some(Bytes(budget)), ..PlanRequest::default() }
}

#[test]
fn a_budget_too_small_names_what_would_do() {
    let layout = layout(&smollm2(), 64 << 10);
    let units = Units::whole_blocks(&layout);
    let error = Plan::new(&layout, &units, &request(60_000_000)).unwrap_err();
    let PlanError::BudgetTooSmall { minimum, ref largest_unit, largest_unit_bytes, base, .. } = error else {
        unreachable!("{error}");
    };
    assert_eq!((largest_unit.as_str(), largest_unit_bytes), ("model.layers.29", Bytes(7_077_888)));
    assert!(
        base.0 >= 56_624_256
            && minimum.0 == base.0 + largest_unit_bytes.0.next_multiple_of(layout.granule().0)
    );
    let text = error.to_string();
    for part in ["57.22 MiB (60000000 bytes)", &minimum.to_string(), "model.layers.29", "6.75 MiB"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert!(Plan::new(&layout, &units, &request(minimum.0)).is_ok());
    assert!(Plan::new(&layout, &units, &request(minimum.0 - 1)).is_err());
    assert!(Plan::new(&layout, &units, &request(0)).is_err());
}

#[test]
fn tensors_have_one_owner() {
    let laid_out = |model: &ModelDesc| Layout::new(model, &options(64 << 10, None));
    let model = Builder::default().base(&[1000]).tower("t", 2, &[5000, 6000]).build();
    assert!(laid_out(&model).is_ok());
    let mut twice = model.clone();
    twice.base.push(TensorId(1));
    assert_eq!(laid_out(&twice), Err(PlanError::TensorTwice { tensor: 1 }));
    let mut nowhere = model.clone();
    nowhere.tensors.push(Bytes(1));
    assert_eq!(laid_out(&nowhere), Err(PlanError::TensorNowhere { tensor: 5 }));
    let mut missing = model.clone();
    missing.base.push(TensorId(9));
    assert_eq!(laid_out(&missing), Err(PlanError::NoSuchTensor { tensor: 9, count: 5 }));
    for size in [u64::MAX, u64::MAX / 2, 1 << 51] {
        let mut large = model.clone();
        large.tensors[0] = Bytes(size);
        assert!(matches!(laid_out(&large), Err(PlanError::ModelTooLarge { .. })));
    }
}

#[test]
fn granules_are_multiples_of_what_the_device_gives() {
    let model = Builder::default().tower("t", 2, &[5000, 6000]).build();
    for (granularity, granule) in
        [(0, None), (100, None), (4096, Some(0)), (4096, Some(6144)), (u64::MAX, None)]
    {
        let refused = Layout::new(&model, &options(granularity, granule));
        assert!(matches!(refused, Err(PlanError::BadGranule { .. })), "{granularity}, {granule:?}");
    }
    assert_eq!(Layout::new(&model, &options(4096, Some(8192))).unwrap().granule(), Bytes(8192));
    // A large model takes larger granules, up to 32 MiB.
    let large = Builder::default().tower("t", 100, &[10 << 30]).build();
    assert_eq!(Layout::new(&large, &options(64 << 10, None)).unwrap().granule(), Bytes::mib(32));
}

#[test]
fn cuts_and_orders_are_checked() {
    let layout = layout(&Builder::default().tower("t", 2, &[5000, 6000, 7000]).build(), 64 << 10);
    let cut = |block: u32, cuts: Vec<u64>| {
        Units::segmented(&layout, &BTreeMap::from([(BlockId(block), cuts)]), None)
    };
    let starts: Vec<u64> = layout.blocks()[0].tensors.iter().map(|&t| layout.offset(t)).collect();
    assert_eq!(cut(0, starts[1..].to_vec()).unwrap().units.len(), 4);
    for wrong in
        [vec![starts[0]], vec![starts[1] + 512], vec![starts[2], starts[1]], vec![starts[1], starts[1]]]
    {
        assert!(matches!(cut(0, wrong), Err(PlanError::BadCut { .. })));
    }
    assert_eq!(cut(2, vec![]), Err(PlanError::NoSuchBlock { block: 2, count: 2 }));
    let order = Units::segmented(&layout, &BTreeMap::new(), Some(vec![UnitId(0), UnitId(2)]));
    assert_eq!(order, Err(PlanError::NoSuchUnit { unit: 2, count: 2 }));
    // Units of another layout.
    let mut units = Units::whole_blocks(&layout);
    units.units.pop();
    units.order.pop();
    assert!(matches!(Plan::new(&layout, &units, &request(1 << 20)), Err(PlanError::NotTiled { .. })));
}

#[test]
fn times_and_rates_are_checked() {
    let layout = layout(&Builder::default().tower("t", 4, &[500_000]).build(), 64 << 10);
    let units = Units::whole_blocks(&layout);
    let with = |compute: Option<Vec<f64>>, link_bytes_per_second: f64| {
        Plan::new(&layout, &units, &PlanRequest { compute, link_bytes_per_second, ..request(1 << 20) })
    };
    for rate in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(matches!(with(None, rate), Err(PlanError::BadLinkRate { .. })));
    }
    for compute in [vec![], vec![0.0; 5], vec![-1.0; 4], vec![f64::NAN; 4]] {
        assert!(matches!(with(Some(compute), 1e9), Err(PlanError::BadComputeTimes { .. })));
    }
    let plan = with(Some(vec![1e-3; 4]), 1e9).unwrap();
    let workload = Workload { compute: vec![0.0; 3], link_bytes_per_second: 1e9, copy_latency: COPY_LATENCY };
    assert!(matches!(simulate(&plan, &workload), Err(PlanError::BadComputeTimes { given: 3, visits: 4 })));
}

#[test]
fn a_model_that_fits_streams_nothing() {
    let layout = layout(&smollm2(), 64 << 10);
    let units = Units::whole_blocks(&layout);
    for request in [PlanRequest::default(), request(300_000_000), request(u64::MAX)] {
        let plan = Plan::new(&layout, &units, &request).unwrap();
        assert_eq!(plan.notes, [PlanNote::EverythingResident]);
        assert_eq!((plan.ring_granules, plan.streamed_bytes_per_step()), (0, Bytes::ZERO));
        let compute = vec![1e-3; units.order.len()];
        let workload = Workload { compute, link_bytes_per_second: 1e9, copy_latency: COPY_LATENCY };
        let step = simulate(&plan, &workload).unwrap();
        assert_eq!((step.copied_bytes, step.stalls.len()), (0, 0));
        assert!((step.step_seconds - 0.030).abs() < 1e-9);
    }
}

#[test]
fn a_small_look_ahead_needs_a_small_ring() {
    let layout = layout(&smollm2(), 64 << 10);
    let units = Units::whole_blocks(&layout);
    let plan =
        |look_ahead| Plan::new(&layout, &units, &PlanRequest { look_ahead, ..request(90_000_000) }).unwrap();
    let (none, free) = (plan(Some(0)), plan(None));
    assert!(none.ring_granules < free.ring_granules, "{} and {}", none.ring_granules, free.ring_granules);
    assert_eq!(none.look_ahead, 0);
    let many = plan(Some(20));
    assert!(many.notes.iter().any(|note| matches!(note, PlanNote::LookAheadReduced { asked: 20, .. })));
}

#[test]
fn small_tensors_join_the_base_unless_a_block_is_made_of_them() {
    let few = Builder::default().tower("t", 3, &[100, 1_000_000, 2_000]).build();
    let spread = layout(&few, 64 << 10);
    assert!(spread.is_base(TensorId(0)) && spread.is_base(TensorId(2)) && !spread.is_base(TensorId(1)));
    assert_eq!(spread.base_granules(), 1);
    let many = Builder::default().tower("t", 3, &[10_000; 200]).build();
    let dense = layout(&many, 64 << 10);
    assert_eq!(dense.base_granules(), 0);
    assert!((0..600).all(|tensor| !dense.is_base(TensorId(tensor))));
}
