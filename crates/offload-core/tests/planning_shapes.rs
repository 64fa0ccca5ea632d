//! Plans of real models' shapes: what fits in which budget, and how.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod models;

use gpu_driver::Bytes;
use models::{layout, minilm, smollm2};
use offload_core::{Plan, PlanRequest, Units};

const KIB_64: u64 = 64 << 10;
const MIB_2: u64 = 2 << 20;

#[test]
fn smollm2_fits_in_a_quarter_of_its_weights() {
    let layout = layout(&smollm2(), KIB_64);
    assert_eq!(layout.model_bytes(), Bytes(269_030_016));
    let budget = Bytes(269_030_016 / 4);
    let units = Units::whole_blocks(&layout);
    let plan = Plan::new(&layout, &units, &PlanRequest { budget: Some(budget), ..PlanRequest::default() }).unwrap();
    plan.check(&layout).unwrap();
    assert!(plan.physical_bytes() <= budget);
}

#[test]
fn minilm_fits_in_two_thirds_of_its_weights() {
    for (granularity, part) in [(KIB_64, 65), (MIB_2, 68)] {
        let layout = layout(&minilm(), granularity);
        let budget = Bytes(layout.model_bytes().0 * part / 100);
        let units = Units::whole_blocks(&layout);
        let plan = Plan::new(&layout, &units, &PlanRequest { budget: Some(budget), ..PlanRequest::default() }).unwrap();
        plan.check(&layout).unwrap();
        assert!(plan.physical_bytes() <= budget);
    }
}
