//! How long planning takes: 2,000 units must be planned in less than 10 ms.
#![expect(clippy::expect_used, reason = "a benchmark of fixed input")]
#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::collections::BTreeMap;

use criterion::{Criterion, criterion_group, criterion_main};
use gpu_driver::Bytes;
use offload_core::{
    BlockDesc, BlockId, Layout, LayoutOptions, ModelDesc, Plan, PlanRequest, SegmentedPlan, TensorId,
    TowerDesc, Units, Workload, simulate,
};

const LINK: f64 = 55.3e9;

/// A tower of blocks of ten tensors each, about as large as a transformer's.
fn layout(blocks: u32) -> Layout {
    const SIZES: [u64; 10] = [52, 52, 52, 52, 26, 26, 52, 52, 141, 141];
    let tensors = (0..blocks).flat_map(|_| SIZES.map(|size| Bytes(size * 100_000))).collect();
    let block = |number: u32| BlockDesc {
        name: format!("blocks.{number}"),
        tensors: (number * 10..number * 10 + 10).map(TensorId).collect(),
    };
    let tower = TowerDesc { name: "blocks".to_owned(), blocks: (0..blocks).map(block).collect() };
    let model = ModelDesc { tensors, base: Vec::new(), towers: vec![tower] };
    Layout::new(&model, &LayoutOptions { granularity: Bytes::mib(2), granule: None }).expect("a sound model")
}

/// Every tensor a unit.
fn tensors(layout: &Layout) -> Units {
    let starts =
        |block: &offload_core::BlockSpan| block.tensors.iter().skip(1).map(|&t| layout.offset(t)).collect();
    let cuts: BTreeMap<BlockId, Vec<u64>> =
        (0..).map(BlockId).zip(layout.blocks().iter().map(starts)).collect();
    Units::segmented(layout, &cuts, None).expect("cuts at tensors")
}

fn planning(criterion: &mut Criterion) {
    for (name, layout) in [("2,000 blocks", layout(2000)), ("200 blocks of 10 tensors", layout(200))] {
        let units =
            if layout.blocks().len() == 2000 { Units::whole_blocks(&layout) } else { tensors(&layout) };
        let units_count = units.units.len();
        for part in [10, 50, 90] {
            let budget = Some(Bytes(layout.model_bytes().0 / 100 * part));
            let unknown = PlanRequest { budget, link_bytes_per_second: LINK, ..PlanRequest::default() };
            let known = PlanRequest { compute: Some(vec![1e-4; units_count]), ..unknown.clone() };
            for (what, request) in [("unknown", unknown), ("known", known)] {
                let name = format!("plan {name} in {part} %, compute {what}");
                criterion.bench_function(&name, |bencher| {
                    bencher
                        .iter(|| Plan::new(&layout, &units, &request).expect("the budget is large enough"));
                });
            }
        }
    }
}

fn segments_and_simulation(criterion: &mut Criterion) {
    let layout = layout(40);
    let finest = tensors(&layout);
    let budget = Some(Bytes(layout.model_bytes().0 / 4));
    let request = PlanRequest { budget, link_bytes_per_second: LINK, ..PlanRequest::default() };
    criterion.bench_function("choose segments of 40 blocks of 10 tensors", |bencher| {
        bencher.iter(|| SegmentedPlan::new(&layout, &finest, &request).expect("the budget is large enough"));
    });
    let plan = Plan::new(&layout, &finest, &request).expect("the budget is large enough");
    let workload = Workload { compute: vec![1e-4; 400], link_bytes_per_second: LINK, copy_latency: 1e-5 };
    criterion.bench_function("simulate 400 units", |bencher| {
        bencher.iter(|| simulate(&plan, &workload).expect("the workload fits the plan"));
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20).measurement_time(std::time::Duration::from_secs(2));
    targets = planning, segments_and_simulation
}
criterion_main!(benches);
