//! The page pool: its limit, its counts, and what it does when the driver refuses.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::Rig;
use gpu_driver::{Bytes, Verb};
use vmm_alloc::{PagePool, VmmError};

const GRANULE: Bytes = Bytes::kib(64);

#[test]
fn refuses_one_page_more_than_the_limit_without_asking_the_driver() {
    let rig = Rig::small();
    // Half a granule of the limit can never be used.
    let limit = Bytes(GRANULE.0 * 5 / 2);
    let pool = PagePool::new(Arc::clone(&rig.driver), GRANULE, limit).unwrap();
    let refused = pool.take(3).unwrap_err();
    assert_eq!(refused, VmmError::Limit { asked: Bytes(GRANULE.0 * 3), limit, in_use: Bytes::ZERO });
    assert_eq!(rig.faulty.calls(Verb::CreatePages), 0);

    let held = pool.take(2).unwrap();
    let in_use = Bytes(GRANULE.0 * 2);
    assert_eq!(pool.take(1).unwrap_err(), VmmError::Limit { asked: GRANULE, limit, in_use });
    assert_eq!(rig.faulty.calls(Verb::CreatePages), 2);

    drop(held);
    assert_eq!(pool.take(2).unwrap().len(), 2);
    let report = pool.report();
    assert_eq!((report.created, report.failed, report.peak, report.in_use), (4, 2, in_use, Bytes::ZERO));
}

#[test]
fn a_huge_take_does_not_overflow() {
    let rig = Rig::small();
    let pool = PagePool::new(Arc::clone(&rig.driver), GRANULE, Bytes(u64::MAX - 1)).unwrap();
    assert!(matches!(pool.take(usize::MAX), Err(VmmError::Limit { .. })));
}

#[test]
fn the_limit_can_be_lowered_below_what_is_in_use() {
    let rig = Rig::small();
    let pool = PagePool::new(Arc::clone(&rig.driver), GRANULE, Bytes(GRANULE.0 * 4)).unwrap();
    let mut held = pool.take(4).unwrap();
    pool.set_limit(Bytes(GRANULE.0 * 2));
    assert!(pool.take(1).is_err());
    held.truncate(2);
    assert!(pool.take(1).is_err());
    held.truncate(1);
    assert_eq!(pool.take(1).unwrap().len(), 1);
    assert!(pool.take(0).unwrap().is_empty());
}

#[test]
fn granules_are_multiples_of_the_granularity() {
    let rig = Rig::small();
    for granule in [Bytes::ZERO, Bytes::kib(4), Bytes::kib(96)] {
        let refused = PagePool::new(Arc::clone(&rig.driver), granule, GRANULE).unwrap_err();
        assert_eq!(refused, VmmError::Granule { granule, granularity: GRANULE });
    }
}

#[test]
fn a_take_that_fails_half_way_gives_everything_back() {
    let rig = Rig::small();
    let pool = PagePool::new(Arc::clone(&rig.driver), GRANULE, Bytes(GRANULE.0 * 8)).unwrap();
    for failing in 0..4 {
        rig.faulty.reset();
        rig.faulty.fail(Verb::CreatePages, failing);
        assert!(matches!(pool.take(4), Err(VmmError::Driver(_))));
        assert_eq!(pool.report().in_use, Bytes::ZERO);
        assert_eq!(rig.host.counters().pages_alive, 0);
    }
    assert_eq!(pool.take(4).unwrap().len(), 4);
}

#[test]
fn device_memory_that_runs_out_is_an_error_with_the_numbers() {
    let rig = Rig::small();
    let pool = PagePool::new(Arc::clone(&rig.driver), GRANULE, Bytes::mib(1024)).unwrap();
    let refused = pool.take(257).unwrap_err();
    assert!(refused.to_string().starts_with("out of device memory"), "{refused}");
    assert!(rig.host.counters().nothing_alive());
    assert_eq!(pool.report().peak, Bytes(GRANULE.0 * 256));
}

#[test]
fn a_page_whose_release_is_refused_counts_until_a_later_try() {
    let rig = Rig::small();
    let pool = PagePool::new(Arc::clone(&rig.driver), GRANULE, Bytes(GRANULE.0 * 2)).unwrap();
    let held = pool.take(2).unwrap();
    // The first page's release, and its retry at the second page's.
    rig.fail_ahead(Verb::ReleasePages, &[0, 1]);
    drop(held);
    let report = pool.report();
    assert_eq!((report.stranded, report.in_use), (1, GRANULE));
    assert_eq!(rig.host.counters().pages_alive, 1);
    assert_eq!(pool.take(2).unwrap().len(), 2);
    assert_eq!((pool.report().stranded, pool.report().in_use), (0, Bytes::ZERO));

    let held = pool.take(1).unwrap();
    rig.fail_ahead(Verb::ReleasePages, &[0]);
    drop(held);
    assert_eq!(pool.report().stranded, 1);
    drop(pool);
    assert!(rig.host.counters().nothing_alive());
}

#[test]
fn many_threads_never_hold_more_than_the_limit() {
    let rig = Rig::small();
    let limit = Bytes(GRANULE.0 * 6);
    let pool = PagePool::new(Arc::clone(&rig.driver), GRANULE, limit).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let pool = pool.clone();
            scope.spawn(move || {
                for round in 0..50 {
                    drop(pool.take(1 + (thread + round) % 3));
                }
            });
        }
    });
    let report = pool.report();
    assert!(report.peak <= limit);
    assert_eq!(report.in_use, Bytes::ZERO);
    assert!(rig.host.counters().nothing_alive());
}
