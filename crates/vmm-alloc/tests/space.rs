//! The address range: mapping, aliasing, the guard mode, leases and drop.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::{Rig, handles, read, write};
use gpu_driver::{Access, Bytes, Verb};
use vmm_alloc::{AddressSpace, PagePool, VmmError};

const GRANULE: Bytes = Bytes::kib(64);

fn pool(rig: &Rig, pages: u64) -> PagePool {
    PagePool::new(Arc::clone(&rig.driver), GRANULE, Bytes(GRANULE.0 * pages)).unwrap()
}

fn space(rig: &Rig, granules: u32) -> Arc<AddressSpace> {
    AddressSpace::reserve(Arc::clone(&rig.driver), GRANULE, granules).unwrap()
}

#[test]
fn an_alias_shows_what_was_written_at_the_other_address() {
    let rig = Rig::small();
    let (pool, space) = (pool(&rig, 2), space(&rig, 6));
    let pages = pool.take(2).unwrap();
    let ring: Vec<_> = pages.iter().cycle().take(6).cloned().collect();
    space.map(0, &ring).unwrap();
    assert_eq!(rig.faulty.calls(Verb::SetAccess), 1, "one call a run");
    write(&space, 4, 7);
    write(&space, 1, 8);
    let seen: Vec<u64> = (0..6).map(|granule| read(&space, granule)).collect();
    assert_eq!(seen, [7, 8, 7, 8, 7, 8]);
    assert_eq!((space.report().mapped, space.report().pages), (6, 2));
    assert_eq!(pool.report().in_use, Bytes(GRANULE.0 * 2));
}

#[test]
fn the_tail_lies_behind_the_range_and_aliases_a_page() {
    let rig = Rig::small();
    let (pool, space) = (pool(&rig, 2), space(&rig, 1));
    let pages = pool.take(2).unwrap();
    space.map(0, &pages[..1]).unwrap();
    write(&space, 0, 5);
    space.set_tail(&pages[0]).unwrap();
    assert_eq!(read(&space, 1), 5);
    space.set_tail(&pages[1]).unwrap();
    assert_eq!(handles(&space)[1], Some(pages[1].handle().0));
    assert!(matches!(space.map(1, &pages[..1]), Err(VmmError::OutOfRange { first: 1, end: 2, granules: 1 })));
    assert!(matches!(space.writable(0, Bytes(GRANULE.0 + 1)), Err(VmmError::OutOfBounds { .. })));
    space.unmap(0, 1).unwrap();
    assert_eq!(space.report().mapped, 1, "unmapping the range leaves the tail");
}

#[test]
fn unmapping_asks_the_driver_once_a_run() {
    let rig = Rig::small();
    let (pool, space) = (pool(&rig, 6), space(&rig, 8));
    let pages = pool.take(5).unwrap();
    space.map(0, &pages[..3]).unwrap();
    space.map(5, &pages[3..]).unwrap();
    drop(pages);
    space.unmap(1, 7).unwrap();
    assert_eq!(rig.faulty.calls(Verb::UnmapPages), 2);
    assert_eq!(space.report().mapped, 1);
    assert_eq!(pool.report().in_use, GRANULE, "pages go back with their last mapping");
    space.unmap(1, 7).unwrap();
    space.unmap(0, 0).unwrap();
    assert_eq!(rig.faulty.calls(Verb::UnmapPages), 2, "nothing to unmap, nothing asked");
}

#[test]
fn wrong_uses_are_refused_and_change_nothing() {
    let rig = Rig::small();
    let (pool, space) = (pool(&rig, 4), space(&rig, 4));
    let pages = pool.take(2).unwrap();
    space.map(1, &pages[..1]).unwrap();
    let before = handles(&space);
    assert_eq!(space.map(0, &pages).unwrap_err(), VmmError::Mapped { granule: 1 });
    assert!(matches!(space.map(3, &pages), Err(VmmError::OutOfRange { first: 3, end: 5, granules: 4 })));
    assert!(matches!(space.map(u32::MAX, &pages), Err(VmmError::OutOfRange { .. })));
    assert!(matches!(space.unmap(u32::MAX, u32::MAX), Err(VmmError::OutOfRange { .. })));
    assert_eq!(space.set_access(1, 2, Access::None).unwrap_err(), VmmError::Unmapped { granule: 2 });
    assert_eq!(
        space.writable(GRANULE.0, Bytes(GRANULE.0 + 1)).unwrap_err(),
        VmmError::Unmapped { granule: 2 }
    );
    assert!(matches!(space.writable(u64::MAX, Bytes(2)), Err(VmmError::OutOfBounds { .. })));

    let coarse = PagePool::new(Arc::clone(&rig.driver), Bytes::kib(128), Bytes::kib(128)).unwrap();
    let other = Rig::small();
    let foreign = PagePool::new(Arc::clone(&other.driver), GRANULE, GRANULE).unwrap();
    for page in [coarse.take(1).unwrap(), foreign.take(1).unwrap()] {
        assert!(matches!(space.map(0, &page), Err(VmmError::ForeignPage { .. })));
        assert!(matches!(space.remap(0, &page), Err(VmmError::ForeignPage { .. })));
        assert!(matches!(space.set_tail(&page[0]), Err(VmmError::ForeignPage { .. })));
    }
    for pool in [&coarse, &foreign] {
        assert!(matches!(space.retire_to_poison(pool), Err(VmmError::ForeignPage { .. })));
    }
    assert_eq!(handles(&space), before);

    let reserve = |granules| AddressSpace::reserve(Arc::clone(&rig.driver), GRANULE, granules);
    assert!(matches!(reserve(0), Err(VmmError::Size { .. })));
    let vast = AddressSpace::reserve(Arc::clone(&rig.driver), Bytes(1 << 60), 100);
    assert!(matches!(vast, Err(VmmError::Size { .. })));
}

#[test]
fn the_guard_mode_shuts_and_opens_runs() {
    let rig = Rig::small();
    let (pool, space) = (pool(&rig, 4), space(&rig, 4));
    space.map(0, &pool.take(4).unwrap()).unwrap();
    write(&space, 2, 3);
    let epoch = space.epoch();
    space.set_access(1, 2, Access::None).unwrap();
    assert_ne!(space.epoch(), epoch, "whoever checked before must check again");
    assert_eq!(space.writable(0, space.size()).unwrap_err(), VmmError::Guarded { granule: 1 });
    assert_eq!(space.report().guarded, 2);
    space.set_access(1, 2, Access::ReadWrite).unwrap();
    assert_eq!(space.writable(8, Bytes(GRANULE.0 * 3)).unwrap(), space.address().offset(Bytes(8)));
    assert_eq!(read(&space, 2), 3, "shutting loses nothing");
}

#[test]
fn a_lease_keeps_the_addresses_after_retirement_and_nothing_else() {
    let rig = Rig::small();
    let (pool, space) = (pool(&rig, 4), space(&rig, 4));
    let pages = pool.take(3).unwrap();
    space.map(0, &pages).unwrap();
    space.set_tail(&pages[0]).unwrap();
    drop(pages);
    let lease = Arc::clone(&space);
    space.retire().unwrap();
    space.retire().unwrap();
    drop(space);
    assert_eq!(pool.report().in_use, Bytes::ZERO);
    let counters = rig.host.counters();
    assert_eq!((counters.reservations_alive, counters.mappings_alive), (1, 0));
    let page = pool.take(1).unwrap();
    assert_eq!(lease.map(0, &page).unwrap_err(), VmmError::Retired);
    assert_eq!(lease.remap(0, &page).unwrap_err(), VmmError::Retired);
    assert_eq!(lease.unmap(0, 1).unwrap_err(), VmmError::Retired);
    assert_eq!(lease.writable(0, Bytes(1)).unwrap_err(), VmmError::Retired);
    assert_eq!(lease.set_tail(&page[0]).unwrap_err(), VmmError::Retired);
    drop((lease, page));
    assert!(rig.host.counters().nothing_alive());
}

#[test]
fn a_range_retired_to_poison_reads_as_ones_everywhere_and_holds_one_page() {
    let rig = Rig::small();
    // The pool is full: the poison page has room only because the range's own pages went back first.
    let (pool, space) = (pool(&rig, 3), space(&rig, 5));
    space.map(1, &pool.take(3).unwrap()).unwrap();
    (1..4).for_each(|granule| write(&space, granule, 1));
    let lease = Arc::clone(&space);
    space.retire_to_poison(&pool).unwrap();
    drop(space);
    assert!((0..6).all(|granule| read(&lease, granule) == u64::MAX), "the tail too");
    assert!(lease.is_retired());
    assert_eq!((pool.report().in_use, lease.report().pages), (GRANULE, 1));
    assert_eq!(lease.writable(0, Bytes(1)).unwrap_err(), VmmError::Retired, "nobody overwrites the poison");
    assert_eq!(lease.retire_to_poison(&pool).unwrap_err(), VmmError::Retired);
    assert_eq!(rig.host.counters().streams_alive, 0);
    drop(lease);
    assert!(rig.host.counters().nothing_alive());
}

#[test]
fn poison_without_room_for_a_page_leaves_a_retired_range() {
    let rig = Rig::small();
    let (pool, space) = (pool(&rig, 1), space(&rig, 2));
    let held = pool.take(1).unwrap();
    space.map(0, &held).unwrap();
    assert!(matches!(space.retire_to_poison(&pool), Err(VmmError::Limit { .. })));
    assert!(space.is_retired());
    assert_eq!(space.report().mapped, 0);
}

#[test]
fn drop_unmaps_then_releases_then_frees() {
    let rig = Rig::small();
    let (pool, space) = (pool(&rig, 2), space(&rig, 3));
    space.map(0, &pool.take(2).unwrap()).unwrap();
    rig.faulty.record();
    drop(space);
    let order = [Verb::UnmapPages, Verb::ReleasePages, Verb::ReleasePages, Verb::FreeAddress];
    assert_eq!(rig.faulty.recorded(), order);
}

#[test]
fn a_shared_page_outlives_the_range_that_drops_first() {
    let rig = Rig::small();
    let (pool, one, two) = (pool(&rig, 1), space(&rig, 2), space(&rig, 2));
    let page = pool.take(1).unwrap();
    one.map(0, &page).unwrap();
    two.map(1, &page).unwrap();
    drop(page);
    write(&one, 0, 9);
    drop(one);
    assert_eq!(read(&two, 1), 9);
    assert_eq!(pool.report().in_use, GRANULE);
}
