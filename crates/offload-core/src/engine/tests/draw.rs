//! The models, devices and plans of random cases.

use std::collections::BTreeMap;

use gpu_driver::{Bytes, CopyOrder};
use pinned_pool::StagingOptions;

use super::Mutant;
use super::desc::{Compute, Levels, RigDesc, minimum, plan};
use super::rng::Rng;
use crate::engine::EngineOptions;
use crate::layout::Layout;
use crate::model::BlockId;
use crate::plan::Plan;
use crate::units::Units;

pub(super) fn draw_rig(rng: &mut Rng, seed: u64, mutant: Option<Mutant>) -> RigDesc {
    let large = rng.once_in(60);
    let top = if large { 3 << 20 } else { 100 << 10 };
    let towers = if large { 1 } else { rng.pick(&[1, 1, 2, 3]) };
    let block = |rng: &mut Rng| -> Vec<u64> {
        let size = |rng: &mut Rng| match rng.below(5) {
            0 => rng.within(0, 2000),
            1 => rng.within(1, top / 8),
            _ => rng.within(top / 8, top),
        };
        (0..rng.within(1, 4)).map(|_| size(rng)).collect()
    };
    RigDesc {
        base: (0..rng.below(3)).map(|_| rng.within(1, 5000)).collect(),
        towers: (0..towers)
            .map(|_| (0..rng.within(2, if towers == 1 { 6 } else { 4 })).map(|_| block(rng)).collect())
            .collect(),
        granularity: if large { Bytes::mib(2) } else { Bytes::kib(64) },
        order: rng.pick(&[CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random, CopyOrder::Random]),
        seed,
        compute: rng.pick(&[Compute::Calling, Compute::Streams(1), Compute::Streams(1), Compute::Streams(2)]),
        options: EngineOptions {
            poison_after_use: !rng.once_in(5),
            guard: rng.once_in(10) && mutant.is_none(), // A mistake under guard ends the process.
            staging: StagingOptions {
                chunk: Some(Bytes(rng.within(1, 20) << 12)),
                bytes: Some(Bytes(rng.within(40, 400) << 10)),
                threads: Some(rng.within(1, 3) as usize),
                ..StagingOptions::default()
            },
        },
        levels: rng.pick(&[Levels::Locked, Levels::Staged, Levels::Mixed]),
        mutant,
    }
}

pub(super) fn draw_plan(rng: &mut Rng, layout: &Layout) -> (Plan, u64) {
    let mut units = if rng.once_in(2) { Units::whole_blocks(layout) } else { draw_segments(rng, layout) };
    if rng.once_in(4) {
        rng.shuffle(&mut units.order);
    }
    if rng.once_in(4) {
        let again = rng.pick(&units.order);
        units.order.push(again);
    }
    let least = minimum(layout, &units);
    let all = u64::from(layout.granules()) * layout.granule().0;
    let room = rng.below(all.saturating_sub(least) + 1);
    let budget = least + rng.pick(&[0, room / 4, room / 2, room]);
    let look_ahead = rng.pick(&[None, None, Some(0), Some(1), Some(2), Some(7)]);
    (plan(layout, &units, budget, look_ahead), budget)
}

fn draw_segments(rng: &mut Rng, layout: &Layout) -> Units {
    let mut cuts = BTreeMap::new();
    for (number, block) in (0..).zip(layout.blocks()) {
        let starts = block.tensors.iter().map(|&tensor| layout.offset(tensor));
        let mut chosen: Vec<u64> = starts.filter(|&start| start > block.span.start).collect();
        chosen.retain(|_| rng.once_in(2));
        chosen.dedup();
        cuts.insert(BlockId(number), chosen);
    }
    Units::segmented(layout, &cuts, None).unwrap()
}
