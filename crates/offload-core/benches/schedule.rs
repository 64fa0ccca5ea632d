//! What a visit costs the host before any driver call: entering and leaving a streamed unit in the steady state.
#![expect(clippy::expect_used, reason = "a benchmark of fixed input")]
#![allow(missing_docs, reason = "criterion's macros make public items")]

use criterion::{Criterion, criterion_group, criterion_main};
use offload_core::{Schedule, UnitId, UnitView};

/// Units that share memory with every fourth other, as four slots do.
fn schedule(units: u32) -> Schedule {
    let slots = 4;
    let others = |unit: u32| (0..units).filter(move |&other| other != unit && other % slots == unit % slots);
    let views: Vec<UnitView> = (0..units)
        .map(|unit| UnitView { streamed: true, conflicts: others(unit).map(UnitId).collect() })
        .collect();
    let order: Vec<UnitId> = (0..units).map(UnitId).collect();
    Schedule::new(&views, &order, 8).expect("units are numbered from zero")
}

fn visits(criterion: &mut Criterion) {
    for units in [40, 160, 2000] {
        let (mut schedule, mut commands) = (schedule(units), Vec::new());
        let mut next = 0;
        criterion.bench_function(&format!("enter and leave, one of {units} units"), |bencher| {
            bencher.iter(|| {
                commands.clear();
                if next == 0 {
                    schedule.begin_step(&mut commands);
                }
                schedule.enter(UnitId(next), &mut commands).expect("nothing is open");
                schedule.leave(UnitId(next), &mut commands).expect("entered above");
                next = (next + 1) % units;
                if next == 0 {
                    schedule.end_step(&mut commands);
                }
            });
        });
    }
}

criterion_group!(benches, visits);
criterion_main!(benches);
