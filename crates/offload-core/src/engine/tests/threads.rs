//! One thread at a time in an engine; several engines at once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use gpu_driver::{CopyOrder, Faulty, StreamHandle};

use super::desc::{Compute, RigDesc, device, minimum, plan};
use super::rig::Rig;
use crate::Engine;
use crate::engine::{EngineDesc, EngineError, EngineOptions, Source, SourcePart};
use crate::model::UnitId;
use crate::units::Units;

fn rig(desc: &RigDesc) -> Rig {
    let layout = desc.layout();
    let units = Units::whole_blocks(&layout);
    let budget = minimum(&layout, &units) + (2 << 16);
    Rig::new(desc, plan(&layout, &units, budget, None), budget).unwrap()
}

#[test]
fn a_second_thread_is_refused_during_a_step() {
    let mut rig = rig(&RigDesc::tower(4, 2));
    rig.begin().unwrap();
    rig.enter(UnitId(0)).unwrap();
    let engine = &rig.engine;
    thread::scope(|scope| {
        let other = scope.spawn(|| {
            let next = engine.plan().as_ref().clone();
            [
                engine.begin_step(StreamHandle::DEFAULT),
                engine.enter(UnitId(1), StreamHandle::DEFAULT),
                engine.leave(UnitId(0), StreamHandle::DEFAULT),
                engine.hold(&[UnitId(1)], StreamHandle::DEFAULT),
                engine.end_step(StreamHandle::DEFAULT),
                engine.replan(next),
                engine.close(StreamHandle::DEFAULT),
            ]
        });
        for refused in other.join().unwrap() {
            assert!(matches!(refused, Err(EngineError::OtherThread)), "{refused:?}");
        }
    });
    rig.compute(UnitId(0)).unwrap();
    rig.leave(UnitId(0)).unwrap();
    rig.end().unwrap();
    rig.finish().unwrap();
    let engine = &rig.engine;
    thread::scope(|scope| {
        let step = || {
            engine.begin_step(StreamHandle::DEFAULT)?;
            engine.enter(UnitId(0), StreamHandle::DEFAULT)?;
            engine.leave(UnitId(0), StreamHandle::DEFAULT)?;
            engine.end_step(StreamHandle::DEFAULT)
        };
        scope.spawn(step).join().unwrap().unwrap();
    });
    rig.whole_step().unwrap();
}

#[test]
fn two_threads_that_fight_for_an_engine_never_compute_with_wrong_bytes() {
    let rig = rig(&RigDesc::tower(4, 2));
    let (engine, barrier) = (&rig.engine, Barrier::new(2));
    let steps = |_| {
        let mut done = 0;
        barrier.wait();
        while done < 20 {
            match engine.begin_step(StreamHandle::DEFAULT) {
                Err(EngineError::OtherThread) => {
                    thread::yield_now();
                    continue;
                }
                other => other.unwrap(),
            }
            for unit in (0..4).map(UnitId) {
                engine.enter(unit, StreamHandle::DEFAULT).unwrap();
                engine.leave(unit, StreamHandle::DEFAULT).unwrap();
            }
            engine.end_step(StreamHandle::DEFAULT).unwrap();
            done += 1;
        }
    };
    thread::scope(|scope| {
        let threads = [0, 1].map(|thread| scope.spawn(move || steps(thread)));
        for thread in threads {
            thread.join().unwrap();
        }
    });
    let stats = engine.stats();
    assert_eq!((stats.steps, stats.visits, stats.recoveries), (40, 160, 0));
}

#[test]
fn two_engines_run_in_two_threads() {
    let desc = RigDesc { compute: Compute::Streams(2), ..RigDesc::tower(5, 2) };
    let layout = desc.layout();
    let units = Units::whole_blocks(&layout);
    let budget = minimum(&layout, &units) + (1 << 16);
    let host = Arc::new(device(&desc));
    let device = Arc::new(Faulty::new(Arc::clone(&host)));
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        for seed in [1, 2] {
            let (desc, plan) = (RigDesc { seed, ..desc.clone() }, plan(&layout, &units, budget, None));
            let (host, device, barrier) = (&host, &device, &barrier);
            scope.spawn(move || {
                let mut rig = Rig::on(&desc, plan, budget, host, device).unwrap();
                barrier.wait();
                for _ in 0..10 {
                    rig.whole_step().unwrap();
                    rig.next_stream();
                }
                rig.engine.close(StreamHandle::DEFAULT).unwrap();
            });
        }
    });
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
}

#[test]
fn the_step_of_a_thread_that_died_can_be_given_up() {
    let mut rig = rig(&RigDesc::tower(4, 2));
    let engine = &rig.engine;
    thread::scope(|scope| scope.spawn(|| engine.begin_step(StreamHandle::DEFAULT)).join().unwrap()).unwrap();
    assert!(matches!(rig.begin(), Err(EngineError::OtherThread)));
    rig.engine.abandon_step();
    rig.whole_step().unwrap();
}

/// A source that panics when told to.
#[derive(Debug)]
struct Panicking {
    inner: Arc<dyn Source>,
    armed: AtomicBool,
}

impl Source for Panicking {
    fn parts(&self, line: &std::ops::Range<u64>) -> Vec<SourcePart> {
        assert!(!self.armed.load(Ordering::Relaxed), "told to");
        self.inner.parts(line)
    }
}

#[test]
fn a_panic_in_a_call_leaves_an_engine_that_runs() {
    let desc = RigDesc { order: CopyOrder::Eager, ..RigDesc::tower(4, 2) };
    let rig = rig(&desc);
    let (layout, plan) = (desc.layout(), rig.engine.plan());
    let source =
        Arc::new(Panicking { inner: rig.engine.lock().source.clone(), armed: AtomicBool::new(false) });
    let driver = rig.engine.space().driver().clone();
    let pool = vmm_alloc::PagePool::new(driver.clone(), layout.granule(), plan.physical_bytes()).unwrap();
    let engine = Engine::new(EngineDesc {
        driver,
        layout,
        plan: plan.as_ref().clone(),
        pool,
        source: Arc::<Panicking>::clone(&source),
        options: EngineOptions::default(),
    })
    .unwrap();
    source.armed.store(true, Ordering::Relaxed);
    let replan = || engine.replan(plan.as_ref().clone());
    assert!(thread::scope(|scope| scope.spawn(replan).join()).is_err());
    source.armed.store(false, Ordering::Relaxed);
    engine.begin_step(StreamHandle::DEFAULT).unwrap();
    engine.enter(UnitId(2), StreamHandle::DEFAULT).unwrap();
    engine.leave(UnitId(2), StreamHandle::DEFAULT).unwrap();
    engine.end_step(StreamHandle::DEFAULT).unwrap();
    engine.close(StreamHandle::DEFAULT).unwrap();
}
