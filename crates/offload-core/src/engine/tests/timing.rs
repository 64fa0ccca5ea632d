//! The times of a step's visits: which steps have them, and what they are of.

use gpu_driver::{Bytes, CopyOrder, Driver, Verb};

use super::desc::{RigDesc, minimum, plan};
use super::rig::Rig;
use crate::engine::StepTimes;
use crate::model::UnitId;
use crate::units::Units;

const VISITS: u32 = 6;

/// A tower of six blocks with room for two of them.
fn rig(order: CopyOrder) -> Rig {
    let desc = RigDesc { order, ..RigDesc::tower(VISITS as usize, 2) };
    let layout = desc.layout();
    let units = Units::whole_blocks(&layout);
    let budget = minimum(&layout, &units) + (2 << 16);
    Rig::new(&desc, plan(&layout, &units, budget, None), budget).unwrap()
}

/// The times, once the device has come to the end of the step.
fn times(rig: &Rig) -> Option<StepTimes> {
    rig.host.synchronize_stream(rig.stream()).unwrap();
    rig.engine.take_step_times()
}

fn all() -> Vec<UnitId> {
    (0..VISITS).map(UnitId).collect()
}

#[test]
fn a_step_is_timed_visit_by_visit_once() {
    for order in [CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random] {
        let mut rig = rig(order);
        rig.whole_step().unwrap();
        assert_eq!(times(&rig), None, "nobody asked");
        rig.engine.time_next_step();
        assert_eq!(times(&rig), None, "no step yet");
        let before = rig.device.calls(Verb::RecordEvent);
        rig.whole_step().unwrap();
        let recorded = rig.device.calls(Verb::RecordEvent) - before;
        let measured = times(&rig).unwrap();
        assert_eq!(measured.visits.iter().map(|(unit, _)| *unit).collect::<Vec<_>>(), all());
        assert!(measured.visits.iter().all(|(_, seconds)| (0.0..60.0).contains(seconds)), "{measured:?}");
        assert_eq!(times(&rig), None, "they are given once");
        let before = rig.device.calls(Verb::RecordEvent);
        rig.whole_step().unwrap();
        let untimed = rig.device.calls(Verb::RecordEvent) - before;
        assert_eq!(
            recorded - untimed,
            2 * u64::from(VISITS) + 2,
            "two timers a visit, one before, one behind"
        );
    }
}

/// Host time spent in a visit is the emulator's compute; waiting for copies is in nobody's time.
#[test]
fn time_goes_to_the_visit_that_computes() {
    let mut rig = rig(CopyOrder::Eager);
    rig.whole_step().unwrap();
    rig.engine.time_next_step();
    let begun = std::time::Instant::now();
    rig.begin().unwrap();
    for unit in all() {
        rig.enter(unit).unwrap();
        if unit == UnitId(3) {
            // The timer before the visit has come by then, however busy the machine is.
            rig.host.synchronize_stream(rig.stream()).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        rig.leave(unit).unwrap();
    }
    rig.end().unwrap();
    let measured = times(&rig).unwrap();
    let whole = begun.elapsed().as_secs_f64();
    assert!(measured.visits[3].1 >= 0.1, "{measured:?}");
    let all: f64 = measured.visits.iter().map(|(_, seconds)| seconds).sum();
    assert!(all <= whole, "{measured:?} in {whole} s");
}

#[test]
fn a_step_with_a_visit_inside_another_has_no_times() {
    let mut rig = rig(CopyOrder::Eager);
    rig.whole_step().unwrap();
    rig.engine.time_next_step();
    rig.begin().unwrap();
    rig.enter(UnitId(0)).unwrap();
    rig.enter(UnitId(1)).unwrap();
    rig.leave(UnitId(1)).unwrap();
    rig.leave(UnitId(0)).unwrap();
    rig.end().unwrap();
    assert_eq!(times(&rig), None);
    rig.whole_step().unwrap();
    assert_eq!(times(&rig), None, "asked for once");
}

#[test]
fn a_step_cut_short_is_not_timed_and_the_next_one_is() {
    let mut rig = rig(CopyOrder::Eager);
    rig.whole_step().unwrap();
    rig.engine.time_next_step();
    rig.begin().unwrap();
    rig.visit(UnitId(0)).unwrap();
    rig.whole_step().unwrap();
    assert_eq!(times(&rig).unwrap().visits.len(), VISITS as usize);
}

#[test]
fn a_timer_that_fails_costs_the_times_and_not_the_step() {
    for verb in [Verb::CreateTimer, Verb::Elapsed] {
        for index in 0..5 {
            let mut rig = rig(CopyOrder::Eager);
            rig.whole_step().unwrap();
            rig.engine.time_next_step();
            rig.device.fail(verb, index);
            rig.whole_step().unwrap();
            assert_eq!(times(&rig), None, "{verb} {index}");
            rig.whole_step().unwrap();
            assert_eq!(rig.engine.stats().recoveries, 0);
        }
    }
}

#[test]
fn the_times_of_a_plan_go_with_it() {
    let mut rig = rig(CopyOrder::Eager);
    rig.engine.time_next_step();
    rig.whole_step().unwrap();
    rig.engine.replan((*rig.engine.plan()).clone()).unwrap();
    assert_eq!(times(&rig), None);
    assert_eq!(rig.engine.link_rate(), None, "{} tell nothing", Bytes(rig.engine.stats().uploaded_bytes));
}
