//! Each driver call of a small life made to fail in turn: nothing half applied, nothing leaked, the next try right.
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::sync::Arc;

use common::{Rig, handles, read, write};
use gpu_driver::{Access, Bytes, Verb};
use vmm_alloc::{AddressSpace, Page, PagePool, VmmError};

const GRANULE: Bytes = Bytes::kib(64);

/// Runs `act` until it works, and checks that a failed try left the range as it was.
fn persist(space: &AddressSpace, act: impl Fn() -> Result<(), VmmError>) {
    let (report, before) = (space.report(), handles(space));
    // One fault at a time is injected, so the second try works.
    for _ in 0..3 {
        let Err(refused) = act() else { return };
        assert!(matches!(refused, VmmError::Driver(_)), "{refused}");
        assert_eq!((space.report(), handles(space)), (report, before.clone()), "after: {refused}");
    }
    panic!("it never works");
}

fn take(pool: &PagePool, count: usize) -> Vec<Arc<Page>> {
    // A page that could not be released still holds its memory; trying again releases it.
    let pages = pool.take(count).or_else(|_| pool.take(count));
    pages.unwrap()
}

/// Everything a range can go through, whatever fails on the way.
fn life(rig: &Rig) {
    let pool = PagePool::new(Arc::clone(&rig.driver), GRANULE, Bytes(GRANULE.0 * 6)).unwrap();
    let reserve = || AddressSpace::reserve(Arc::clone(&rig.driver), GRANULE, 8);
    let space = reserve().or_else(|_| reserve()).unwrap();
    let own = take(&pool, 3);
    let ring = take(&pool, 2);
    persist(&space, || space.map(0, &own));
    persist(&space, || space.map(4, &[&ring[..], &ring[..]].concat()));
    persist(&space, || space.set_tail(&own[0]));
    (0..3).for_each(|granule| write(&space, granule, 10 + u64::from(granule)));
    write(&space, 6, 20);
    persist(&space, || space.set_access(1, 2, Access::None));
    // Two runs of unlike access: undoing must give each its own back.
    persist(&space, || space.remap(0, &[&ring[..1], &own[1..2]].concat()));
    persist(&space, || space.set_access(0, 3, Access::ReadWrite));
    assert_eq!([read(&space, 0), read(&space, 1), read(&space, 2)], [20, 11, 12]);
    // A hole at granule 3: two runs.
    persist(&space, || space.unmap(1, 5));
    assert_eq!([read(&space, 0), read(&space, 6), read(&space, 8)], [20, 20, 10]);
    drop((own, ring));
    let lease = Arc::clone(&space);
    match space.retire_to_poison(&pool) {
        Ok(()) => assert!((0..9).all(|granule| read(&lease, granule) == u64::MAX)),
        Err(_) if space.is_retired() => {}
        Err(_) => space.retire().unwrap(),
    }
}

#[test]
fn any_single_refusal_leaves_nothing_behind() {
    let rig = Rig::small();
    life(&rig);
    let clean: Vec<(Verb, u64)> = Verb::ALL.iter().map(|&verb| (verb, rig.faulty.calls(verb))).collect();
    assert!(rig.host.counters().nothing_alive(), "{:?}", rig.host.counters());
    let used = clean.iter().filter(|(_, calls)| *calls > 0).count();
    assert_eq!(used, 11, "the life uses every verb this crate calls: {clean:?}");
    for (verb, calls) in clean {
        for index in 0..calls {
            rig.faulty.reset();
            rig.faulty.fail(verb, index);
            life(&rig);
            assert!(rig.host.counters().nothing_alive(), "{verb} call {index}: {:?}", rig.host.counters());
        }
    }
    rig.faulty.reset();
    life(&rig);
}

fn mapped(rig: &Rig) -> (PagePool, Arc<AddressSpace>) {
    let pool = PagePool::new(Arc::clone(&rig.driver), GRANULE, Bytes(GRANULE.0 * 8)).unwrap();
    let space = AddressSpace::reserve(Arc::clone(&rig.driver), GRANULE, 6).unwrap();
    (pool, space)
}

#[test]
fn a_map_whose_undoing_fails_says_so_and_keeps_its_pages() {
    let rig = Rig::small();
    let (pool, space) = mapped(&rig);
    let pages = pool.take(4).unwrap();
    rig.fail_ahead(Verb::MapPages, &[3]);
    rig.fail_ahead(Verb::UnmapPages, &[0]);
    let VmmError::Undo(failure) = space.map(1, &pages).unwrap_err() else { panic!("a double failure") };
    assert_eq!((failure.first, failure.end), (1, 4));
    drop(pages);
    assert_eq!(pool.report().in_use, Bytes(GRANULE.0 * 3), "what is mapped is held");
    assert_eq!(space.writable(GRANULE.0, Bytes(1)).unwrap_err(), VmmError::Guarded { granule: 1 });
    space.unmap(0, 6).unwrap();
    assert_eq!(pool.report().in_use, Bytes::ZERO);
    drop(space);
    assert!(rig.host.counters().nothing_alive());
}

#[test]
fn an_unmap_whose_undoing_fails_says_so_and_the_table_stays_true() {
    let rig = Rig::small();
    let (pool, space) = mapped(&rig);
    for (first, count) in [(0, 2), (3, 1), (5, 1)] {
        space.map(first, &pool.take(count).unwrap()).unwrap();
    }
    // The third run stays, the first cannot be put back, the second can.
    rig.fail_ahead(Verb::UnmapPages, &[2]);
    rig.fail_ahead(Verb::MapPages, &[1]);
    let VmmError::Undo(failure) = space.unmap(0, 6).unwrap_err() else { panic!("a double failure") };
    assert_eq!((failure.first, failure.end), (0, 2));
    let now: Vec<bool> = handles(&space).iter().map(Option::is_some).collect();
    assert_eq!(now, [false, false, false, true, false, true, false]);
    assert_eq!(rig.host.counters().mappings_alive, 2);
    assert_eq!(pool.report().in_use, Bytes(GRANULE.0 * 2));
    space.unmap(0, 6).unwrap();
    drop(space);
    assert!(rig.host.counters().nothing_alive());
}

#[test]
fn drop_survives_a_driver_that_refuses_for_good() {
    let rig = Rig::small();
    let (pool, space) = mapped(&rig);
    space.map(0, &pool.take(2).unwrap()).unwrap();
    rig.fail_ahead(Verb::UnmapPages, &[0, 1]);
    drop(space);
    let counters = rig.host.counters();
    assert_eq!((counters.reservations_alive, counters.mappings_alive, counters.pages_alive), (1, 2, 2));
    assert_eq!(pool.report().in_use, Bytes(GRANULE.0 * 2), "held memory keeps counting");

    let (_, space) = mapped(&rig);
    rig.fail_ahead(Verb::FreeAddress, &[0, 1]);
    drop(space);
    assert_eq!(rig.host.counters().reservations_alive, 2);
}
