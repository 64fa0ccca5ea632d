//! Every call of every verb fails once in a small run: nothing leaks, no number is wrong, and the next run is right.

use std::sync::Arc;

use gpu_driver::{Bytes, CopyOrder, Faulty, StreamHandle, Verb};

use pinned_pool::StagingOptions;

use super::case::is_injected;
use super::desc::{Compute, Levels, RigDesc, device, minimum, plan};
use super::rig::{Failure, Rig};
use crate::engine::{EngineError, EngineOptions};
use crate::model::UnitId;
use crate::plan::{Plan, PlanRequest};
use crate::units::Units;

/// A run in which each call may fail once: what failed is done again, and must succeed then.
struct Run {
    fault: Option<(Verb, u64)>,
    faults: usize,
}

impl Run {
    /// Does something again if it failed on purpose.
    fn again<T>(&mut self, mut act: impl FnMut() -> Result<T, EngineError>) -> T {
        match act() {
            Err(error) if is_injected(&error) => {
                self.faults += 1;
                act().unwrap_or_else(|error| panic!("the second time: {error}"))
            }
            other => other.unwrap(),
        }
    }

    /// What may fail on purpose, and only so.
    fn tolerate(&mut self, result: Result<(), Failure>) {
        match result {
            Err(Failure::Error(error)) if is_injected(&error) => self.faults += 1,
            other => other.unwrap(),
        }
    }

    /// A step; if it fails, what is open is left, and the next one must be right.
    fn step(&mut self, rig: &mut Rig) {
        let units = rig.engine.order();
        for attempt in 0..2 {
            match rig.step(&units) {
                Ok(()) => return,
                Err(Failure::Error(error)) if is_injected(&error) && attempt == 0 => {
                    self.faults += 1;
                    for &unit in &units {
                        _ = rig.leave(unit);
                    }
                    _ = rig.end();
                    rig.finish().unwrap();
                }
                Err(failure) => panic!("{:?}, attempt {attempt}: {failure:?}", self.fault),
            }
        }
    }
}

/// How many calls failed, and how many of each verb there were.
type Outcome = (usize, Vec<(Verb, u64)>);

/// The run: start, two steps, another plan, two steps, a hold, the end.
fn run(desc: &RigDesc, plans: &[Plan; 2], limit: u64, fault: Option<(Verb, u64)>) -> Outcome {
    let host = Arc::new(device(desc));
    let device = Arc::new(Faulty::new(Arc::clone(&host)));
    if let Some((verb, index)) = fault {
        device.fail(verb, index);
    }
    let mut run = Run { fault, faults: 0 };
    let mut rig = run.again(|| {
        let rig = Rig::on(desc, plans[0].clone(), limit, &host, &device);
        if rig.is_err() {
            assert!(host.counters().nothing_alive(), "after a failed start: {:?}", host.counters());
        }
        rig
    });
    run.step(&mut rig);
    run.step(&mut rig);
    // If this fails, the next step completes it.
    run.tolerate(rig.engine.replan(plans[1].clone()).map_err(Failure::Error));
    run.step(&mut rig);
    run.step(&mut rig);
    assert_eq!(*rig.engine.plan(), plans[1]);
    let held = UnitId(1);
    run.again(|| rig.hold(held));
    let computed = rig.compute(held);
    run.tolerate(computed);
    run.tolerate(rig.engine.release(&[held], rig.stream()).map_err(Failure::Error));
    run.tolerate(rig.finish());
    run.step(&mut rig);
    run.again(|| rig.engine.close(StreamHandle::DEFAULT));
    assert!(rig.pool.report().peak.0 <= limit);
    let calls = rig.drop_engine_then_streams();
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
    (run.faults, calls)
}

/// A run whose budget is raised and lowered: start, a step, more, a step, less, two steps, the end.
fn run_budgets(desc: &RigDesc, plans: &[Plan; 2], limits: [u64; 2], fault: Option<(Verb, u64)>) -> Outcome {
    let host = Arc::new(device(desc));
    let device = Arc::new(Faulty::new(Arc::clone(&host)));
    let mut run = Run { fault, faults: 0 };
    let mut rig = Rig::on(desc, plans[0].clone(), limits[0], &host, &device).unwrap();
    run.step(&mut rig);
    device.reset();
    if let Some((verb, index)) = fault {
        device.fail(verb, index);
    }
    let raised = rig.engine.rebudget(plans[1].clone(), Bytes(limits[1]));
    // What a failure prevents is as it was, at once or from the next step on.
    assert_eq!(rig.engine.coming_limit().0, limits[usize::from(raised.is_ok())], "{raised:?}");
    assert_eq!(*rig.engine.coming_plan(), plans[usize::from(raised.is_ok())]);
    run.tolerate(raised.map_err(Failure::Error));
    run.step(&mut rig);
    let stranded = rig.pool.report().stranded << 16;
    assert!(rig.engine.report().page_bytes_in_use <= rig.engine.coming_limit().0 + stranded);
    run.again(|| rig.engine.rebudget(plans[1].clone(), Bytes(limits[1])));
    let (uploaded, created) = (rig.engine.stats().uploaded_bytes, rig.pool.report().created);
    let lowered = rig.engine.rebudget(plans[0].clone(), Bytes(limits[0]));
    assert_eq!(rig.engine.coming_limit().0, limits[0], "a lower budget comes, {lowered:?}");
    if lowered.is_ok() {
        assert_eq!(rig.engine.stats().uploaded_bytes, uploaded, "nothing became resident");
        assert_eq!(rig.pool.report().created, created, "no page was made");
    }
    run.tolerate(lowered.map_err(Failure::Error));
    run.step(&mut rig);
    assert_eq!(*rig.engine.plan(), plans[0]);
    let stranded = rig.pool.report().stranded << 16; // The driver will not have them back.
    assert!(rig.engine.report().page_bytes_in_use <= limits[0] + stranded);
    run.step(&mut rig);
    run.again(|| rig.engine.close(StreamHandle::DEFAULT));
    assert!(rig.pool.report().peak.0 <= limits[1]);
    let calls = rig.drop_engine_then_streams();
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
    (run.faults, calls)
}

/// A step in whose middle the budget shrinks, and what a failure there leaves.
fn run_shrink(desc: &RigDesc, plans: &[Plan; 2], limits: [u64; 2], fault: Option<(Verb, u64)>) -> Outcome {
    let host = Arc::new(device(desc));
    let device = Arc::new(Faulty::new(Arc::clone(&host)));
    let mut rig = Rig::on(desc, plans[1].clone(), limits[1], &host, &device).unwrap();
    rig.whole_step().unwrap();
    rig.begin().unwrap();
    for unit in [0, 1] {
        rig.enter(UnitId(unit)).unwrap();
        rig.compute(UnitId(unit)).unwrap();
        if unit == 0 {
            rig.leave(UnitId(unit)).unwrap();
        }
    }
    device.reset();
    if let Some((verb, index)) = fault {
        device.fail(verb, index);
    }
    let shrunk = rig.engine.shrink(plans[0].clone(), Bytes(limits[0]));
    let calls = Verb::ALL.iter().map(|&verb| (verb, device.calls(verb))).collect();
    device.reset();
    let faults = usize::from(shrunk.is_err());
    if let Err(error) = &shrunk {
        assert!(is_injected(error), "{error}");
    }
    let spoilt = rig.engine.report().recovery_pending;
    assert!(!spoilt || shrunk.is_err());
    if !spoilt {
        rig.compute(UnitId(1)).unwrap();
    }
    rig.leave(UnitId(1)).unwrap();
    let ended = rig.end();
    assert_eq!(ended.is_err(), spoilt, "a step whose memory was taken must not end well: {ended:?}");
    rig.finish().unwrap();
    for _ in 0..2 {
        rig.whole_step().unwrap();
    }
    let now = usize::from(rig.engine.coming_limit().0 != limits[0]);
    assert_eq!((&*rig.engine.plan(), rig.pool.report().limit.0), (&plans[now], limits[now]));
    rig.engine.close(StreamHandle::DEFAULT).unwrap();
    rig.drop_engine_then_streams();
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
    (faults, calls)
}

#[test]
fn any_call_may_fail_while_the_budget_shrinks_in_a_step() {
    for levels in [Levels::Locked, Levels::Mixed] {
        let mut desc = RigDesc::tower(4, 1);
        (desc.order, desc.compute, desc.levels) = (CopyOrder::Lazy, Compute::Streams(1), levels);
        let layout = desc.layout();
        let units = Units::whole_blocks(&layout);
        let limits = [minimum(&layout, &units), minimum(&layout, &units) + (2 << 16)];
        let large = plan(&layout, &units, limits[1], None);
        let within = Some(large.backing.clone());
        let request = PlanRequest { budget: Some(Bytes(limits[0])), within, ..PlanRequest::default() };
        let plans = [Plan::new(&layout, &units, &request).unwrap(), large];
        let (none, clean) = run_shrink(&desc, &plans, limits, None);
        assert_eq!(none, 0);
        let mut faults = 0;
        for (verb, calls) in clean {
            for index in 0..calls {
                faults += run_shrink(&desc, &plans, limits, Some((verb, index))).0;
            }
        }
        assert!(faults > 10, "only {faults} calls failed");
    }
}

#[test]
fn any_call_may_fail_while_the_budget_changes() {
    for levels in [Levels::Locked, Levels::Mixed] {
        let mut desc = RigDesc::tower(4, 1);
        (desc.order, desc.compute, desc.levels) = (CopyOrder::Random, Compute::Streams(2), levels);
        let layout = desc.layout();
        let units = Units::whole_blocks(&layout);
        let limits = [minimum(&layout, &units), minimum(&layout, &units) + (2 << 16)];
        let plans = limits.map(|limit| plan(&layout, &units, limit, None));
        let (_, clean) = run_budgets(&desc, &plans, limits, None);
        let mut faults = 0;
        for (verb, calls) in clean {
            for index in 0..calls {
                faults += run_budgets(&desc, &plans, limits, Some((verb, index))).0;
            }
        }
        assert!(faults > 50, "only {faults} calls failed");
    }
}

fn every_fault(order: CopyOrder, options: EngineOptions, levels: Levels) {
    let mut desc = RigDesc::tower(4, 1);
    (desc.order, desc.options, desc.compute, desc.levels) = (order, options, Compute::Streams(2), levels);
    let layout = desc.layout();
    let whole = Units::whole_blocks(&layout);
    let cuts = (0..).zip(layout.blocks()).map(|(id, block)| {
        let middle = layout.offset(block.tensors[1]);
        (crate::BlockId(id), vec![middle])
    });
    let segments = Units::segmented(&layout, &cuts.collect(), None).unwrap();
    let limit = minimum(&layout, &whole) + (1 << 16);
    let plans = [plan(&layout, &whole, limit, None), plan(&layout, &segments, limit, None)];
    let (_, clean) = run(&desc, &plans, limit, None);
    let mut faults = 0;
    for (verb, calls) in clean {
        for index in 0..calls {
            let (seen, _) = run(&desc, &plans, limit, Some((verb, index)));
            faults += seen;
        }
    }
    assert!(faults > 100, "only {faults} calls failed");
}

#[test]
fn any_call_may_fail() {
    every_fault(
        CopyOrder::Random,
        EngineOptions { poison_after_use: true, ..EngineOptions::default() },
        Levels::Locked,
    );
}

#[test]
fn any_call_may_fail_under_guard() {
    every_fault(CopyOrder::Lazy, EngineOptions { guard: true, ..EngineOptions::default() }, Levels::Locked);
}

#[test]
fn any_call_may_fail_with_a_staging_ring() {
    let staging = StagingOptions {
        chunk: Some(Bytes::kib(16)),
        bytes: Some(Bytes::kib(64)),
        threads: Some(2),
        ..StagingOptions::default()
    };
    let options = EngineOptions { poison_after_use: true, staging, ..EngineOptions::default() };
    every_fault(CopyOrder::Random, options, Levels::Mixed);
}
