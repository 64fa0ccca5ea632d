//! The engine's life, call by call.

use gpu_driver::{Bytes, CopyOrder, Driver, StreamHandle};
use vmm_alloc::PagePool;

use super::desc::{RigDesc, minimum, plan};
use super::rig::{Failure, Rig};
use crate::engine::EngineError;
use crate::model::UnitId;
use crate::plan::{Plan, PlanRequest};
use crate::units::Units;

/// A tower of blocks of two pages each, with room for two of them.
fn two_slots(desc: &RigDesc) -> Rig {
    let layout = desc.layout();
    let units = Units::whole_blocks(&layout);
    let budget = minimum(&layout, &units) + (2 << 16);
    Rig::new(desc, plan(&layout, &units, budget, None), budget).unwrap()
}

/// The same with room for one.
fn one_slot(desc: &RigDesc) -> Rig {
    let layout = desc.layout();
    let units = Units::whole_blocks(&layout);
    let budget = minimum(&layout, &units);
    Rig::new(desc, plan(&layout, &units, budget, None), budget).unwrap()
}

#[test]
fn a_model_streams_through_its_budget() {
    let mut rig = two_slots(&RigDesc::tower(6, 2));
    for _ in 0..3 {
        rig.whole_step().unwrap();
    }
    let stats = rig.engine.stats();
    assert_eq!((stats.steps, stats.visits, stats.replans, stats.recoveries), (3, 18, 0, 0));
    assert!(stats.copies >= 12 && stats.fetched_on_demand == 0, "{stats:?}");
    assert!(stats.copied_bytes >= stats.copies * (1 << 16) && stats.waits >= stats.visits, "{stats:?}");
    let report = rig.engine.report();
    assert_eq!(report.units.iter().map(|unit| unit.copies).sum::<u64>(), stats.copies);
    assert!(report.units.iter().all(|unit| (unit.copies > 0) == (unit.streamed_bytes > 0)), "{report:?}");
    assert_eq!(report.page_bytes_peak, u64::from(report.own_pages + report.ring_pages) * report.page_bytes);
    assert!(report.page_bytes_peak <= report.page_limit_bytes);
    rig.engine.close(StreamHandle::DEFAULT).unwrap();
    assert!(matches!(rig.enter(UnitId(0)), Err(EngineError::Closed)));
    rig.engine.close(StreamHandle::DEFAULT).unwrap();
    let host = rig.host.clone();
    drop(rig);
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
}

#[test]
fn a_budget_above_the_model_copies_nothing() {
    let desc = RigDesc::tower(3, 2);
    let layout = desc.layout();
    let plan = plan(&layout, &Units::whole_blocks(&layout), 1 << 30, None);
    let limit = plan.physical_bytes().0;
    let mut rig = Rig::new(&desc, plan, limit).unwrap();
    rig.whole_step().unwrap();
    assert_eq!(rig.engine.stats().copies, 0);
    assert_eq!(rig.engine.stats().uploaded_bytes, layout.model_bytes().0);
}

#[test]
fn units_open_at_once_conflict_by_name() {
    let mut rig = one_slot(&RigDesc::tower(3, 2));
    rig.begin().unwrap();
    rig.enter(UnitId(0)).unwrap();
    let error = rig.enter(UnitId(2)).unwrap_err();
    assert!(matches!(&error, EngineError::Conflict { unit, open } if unit == "block 2" && open == "block 0"));
    assert!(error.to_string().starts_with("block 2 cannot be used while block 0 is in use"), "{error}");
    // The refusal changed nothing: the step goes on.
    rig.compute(UnitId(0)).unwrap();
    rig.leave(UnitId(0)).unwrap();
    rig.visit(UnitId(2)).unwrap();
    rig.end().unwrap();
    rig.finish().unwrap();
    assert_eq!(rig.engine.stats().recoveries, 0);
    assert!(matches!(rig.leave(UnitId(2)), Err(EngineError::Visit(_))));
    assert!(matches!(rig.end(), Err(EngineError::NoStep)));
}

#[test]
fn a_step_that_was_never_ended_is_made_good() {
    let mut rig = two_slots(&RigDesc::tower(5, 2));
    rig.whole_step().unwrap();
    rig.begin().unwrap();
    rig.enter(UnitId(0)).unwrap();
    rig.compute(UnitId(0)).unwrap();
    rig.whole_step().unwrap();
    assert_eq!(rig.engine.stats().recoveries, 1);
    rig.whole_step().unwrap();
    assert_eq!(rig.engine.stats().recoveries, 1);
}

#[test]
fn units_are_right_outside_steps_and_while_held() {
    let mut rig = two_slots(&RigDesc::tower(5, 2));
    for unit in [3, 0, 4, 1, 1] {
        rig.visit(UnitId(unit)).unwrap();
    }
    rig.hold(UnitId(2)).unwrap();
    rig.compute(UnitId(2)).unwrap();
    rig.begin().unwrap();
    let order = rig.engine.plan().order.clone();
    for unit in order {
        match rig.visit(unit) {
            Err(Failure::Error(EngineError::Conflict { open, .. })) => assert_eq!(open, "block 2"),
            other => other.unwrap(),
        }
        rig.compute(UnitId(2)).unwrap();
    }
    rig.end().unwrap();
    let next = rig.engine.plan().as_ref().clone();
    assert!(matches!(rig.engine.replan(next), Err(EngineError::Held { unit: UnitId(2), .. })));
    rig.engine.release(&[UnitId(2)], rig.stream()).unwrap();
    assert!(rig.engine.release(&[UnitId(2)], rig.stream()).is_err());
    rig.whole_step().unwrap();
}

#[test]
fn holding_units_that_conflict_holds_none() {
    let rig = one_slot(&RigDesc::tower(3, 2));
    let both = [UnitId(0), UnitId(1)];
    assert!(matches!(rig.engine.hold(&both, rig.stream()), Err(EngineError::Conflict { .. })));
    let next = rig.engine.plan().as_ref().clone();
    rig.engine.replan(next).unwrap();
}

#[test]
fn a_replan_moves_only_what_changes() {
    let desc = RigDesc::tower(6, 2);
    let layout = desc.layout();
    let units = Units::whole_blocks(&layout);
    let (least, most) = (minimum(&layout, &units), minimum(&layout, &units) + (8 << 16));
    let [small, large] = [least, most].map(|budget| plan(&layout, &units, budget, None));
    let mut rig = Rig::new(&desc, small.clone(), most).unwrap();
    rig.whole_step().unwrap();
    let before = rig.engine.stats().uploaded_bytes;
    rig.engine.replan(large.clone()).unwrap();
    rig.whole_step().unwrap();
    let added = rig.engine.stats().uploaded_bytes - before;
    let grown = u64::from(large.own_granules - small.own_granules) << 16;
    assert!(added > 0 && added <= grown, "{added} bytes for {grown} more");
    rig.engine.replan(small).unwrap();
    rig.whole_step().unwrap();
    assert_eq!(rig.engine.stats().uploaded_bytes, before + added, "nothing new is resident");
    assert_eq!(rig.engine.stats().replans, 2);
    assert_eq!(rig.engine.report().page_bytes_in_use, least);
    rig.pool.set_limit(Bytes(least));
    let error = rig.engine.replan(large).unwrap_err();
    assert!(matches!(error, EngineError::PageLimit { .. }), "{error}");
    rig.whole_step().unwrap();
}

#[test]
fn another_budget_is_for_between_steps_and_keeps_what_is_resident() {
    let desc = RigDesc::tower(6, 2);
    let layout = desc.layout();
    let units = Units::whole_blocks(&layout);
    let least = minimum(&layout, &units);
    let budgets = [least, least + (4 << 16), least + (8 << 16)];
    let [small, middle, large] = budgets.map(|budget| plan(&layout, &units, budget, None));
    let mut rig = Rig::new(&desc, middle.clone(), budgets[1]).unwrap();
    rig.begin().unwrap();
    let within = rig.engine.rebudget(large.clone(), Bytes(budgets[2]));
    assert!(matches!(within, Err(EngineError::InStep { .. })), "{within:?}");
    assert_eq!((rig.engine.coming_limit().0, &*rig.engine.coming_plan()), (budgets[1], &middle));
    rig.end().unwrap();
    let too_little = rig.engine.rebudget(large.clone(), Bytes(budgets[1]));
    assert!(matches!(too_little, Err(EngineError::PageLimit { .. })), "{too_little:?}");
    rig.engine.rebudget(large.clone(), Bytes(budgets[2])).unwrap();
    rig.whole_step().unwrap();
    let uploaded = rig.engine.stats().uploaded_bytes;
    let request = PlanRequest {
        budget: Some(Bytes(budgets[0])),
        within: Some(large.backing.clone()),
        ..PlanRequest::default()
    };
    let smaller = Plan::new(&layout, &units, &request).unwrap();
    assert_eq!(smaller.physical_bytes(), small.physical_bytes());
    rig.engine.rebudget(smaller, Bytes(budgets[0])).unwrap();
    assert_eq!(rig.engine.stats().uploaded_bytes, uploaded);
    assert_eq!(rig.engine.report().page_bytes_in_use, budgets[0]);
    let over = rig.engine.replan(middle);
    assert!(matches!(over, Err(EngineError::PageLimit { .. })), "{over:?}");
    rig.whole_step().unwrap();
}

#[test]
fn a_raise_for_which_the_device_has_no_memory_leaves_all_as_it_was() {
    let desc = RigDesc::tower(6, 2);
    let layout = desc.layout();
    let units = Units::whole_blocks(&layout);
    let least = minimum(&layout, &units);
    let budgets = [least, least + (8 << 16)];
    let plans = budgets.map(|budget| plan(&layout, &units, budget, None));
    let mut rig = Rig::new(&desc, plans[0].clone(), budgets[0]).unwrap();
    rig.whole_step().unwrap();
    // Somebody else takes all but a page.
    let free = rig.host.memory_info().unwrap().free.0 / (1 << 16);
    let other = PagePool::new(rig.host.clone(), Bytes(1 << 16), Bytes(free << 16)).unwrap();
    let taken = other.take(free as usize - 1).unwrap();
    let refused = rig.engine.rebudget(plans[1].clone(), Bytes(budgets[1])).unwrap_err();
    assert!(refused.to_string().contains("memory"), "{refused}");
    assert!(!rig.engine.report().replan_pending, "it was put back at once");
    assert_eq!(rig.engine.coming_limit().0, budgets[0]);
    rig.whole_step().unwrap();
    drop(taken);
    rig.engine.rebudget(plans[1].clone(), Bytes(budgets[1])).unwrap();
    rig.whole_step().unwrap();
}

#[test]
fn a_plan_of_another_model_is_refused() {
    let rig = two_slots(&RigDesc::tower(4, 2));
    let other = RigDesc::tower(3, 2).layout();
    let foreign = plan(&other, &Units::whole_blocks(&other), 1 << 30, None);
    assert!(matches!(rig.engine.replan(foreign), Err(EngineError::ForeignPlan { .. })));
}

#[test]
fn under_guard_an_absent_unit_cannot_be_read() {
    let mut desc = RigDesc::tower(5, 2);
    desc.options.guard = true;
    let mut rig = two_slots(&desc);
    rig.begin().unwrap();
    rig.visit(UnitId(0)).unwrap();
    rig.finish().unwrap();
    let absent = rig.compute(UnitId(4));
    assert!(matches!(&absent, Err(Failure::Error(error)) if error.to_string().contains("inaccessible")));
    rig.visit(UnitId(4)).unwrap();
    rig.end().unwrap();
    rig.whole_step().unwrap();
}

#[test]
fn leases_read_poison_after_the_end() {
    let rig = two_slots(&RigDesc::tower(4, 2));
    let (space, host, engine) = (rig.engine.space().clone(), rig.host.clone(), &rig.engine);
    engine.close(StreamHandle::DEFAULT).unwrap();
    let counters = host.counters();
    assert!(space.is_retired());
    assert_eq!(counters.page_bytes_alive, space.granule(), "one page stands behind all addresses");
    assert_eq!(counters.mappings_alive, u64::from(space.granules()) + 1);
    assert!(rig.engine.begin_step(rig.stream()).is_err());
}

#[test]
fn dropping_a_busy_engine_leaks_and_does_not_wait() {
    let mut desc = RigDesc::tower(4, 2);
    desc.order = CopyOrder::Lazy;
    let rig = two_slots(&desc);
    rig.begin().unwrap(); // Its copies run only when someone waits for them.
    let host = rig.host.clone();
    drop(rig);
    assert!(host.counters().pages_alive > 0);
}
