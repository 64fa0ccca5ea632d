//! Page-locked memory: unlocked before it is freed, counted in the whole process, never twice.
#![allow(clippy::unwrap_used, unsafe_code)]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use common::{PAGE, Part, Region, Rig, alone, small_options, upload};
use gpu_driver::{Bytes, Registration, Verb};
use pinned_pool::{
    HostError, HostLevel, HostMaps, HostStore, KeepAlive, MemoryKind, Registered, StoreOptions,
    registered_bytes,
};
use rustix::mm::MapFlags;

/// Registers a whole region.
fn register(
    rig: &Rig,
    region: Arc<Region>,
    pages: u64,
    limit: Option<Bytes>,
) -> Result<Registered, HostError> {
    let (driver, address) = (Arc::clone(&rig.driver), region.address());
    let keep: Vec<KeepAlive> = vec![region];
    // SAFETY: the region's own anonymous memory, which the keep-alive holds.
    unsafe { Registered::new(driver, address, Bytes(pages * PAGE), Registration::ReadWrite, limit, keep) }
}

/// Registrations in force and the last driver call, at each free.
type Log = Mutex<Vec<(u64, Option<Verb>)>>;

/// A region that notes, when it is freed, how many registrations were in force and what the last driver call was.
fn watched(rig: &Rig, pages: u64, log: &Arc<Log>) -> Region {
    let (host, faulty, log) = (Arc::clone(&rig.host), Arc::clone(&rig.faulty), Arc::clone(log));
    Region::anonymous(pages, 1).on_drop(move || {
        let entry = (host.counters().registrations_alive, faulty.recorded().last().copied());
        log.lock().unwrap().push(entry);
    })
}

#[test]
fn memory_is_unregistered_before_it_is_freed() {
    let _alone = alone();
    let before = registered_bytes();
    let rig = Rig::eager();
    let log = Arc::new(Mutex::new(Vec::new()));
    rig.faulty.record();
    let registered = register(&rig, watched(&rig, 2, &log).share(), 2, None).unwrap();
    drop(registered);
    assert_eq!(*log.lock().unwrap(), [(0, Some(Verb::UnregisterHost))]);

    // The same through a store, whose tensor is registered in place.
    log.lock().unwrap().clear();
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(8 * PAGE), small_options());
    builder.place(&[Part::whole(watched(&rig, 4, &log)).source(0, 0)]).unwrap();
    drop(builder.finish().unwrap());
    assert_eq!(*log.lock().unwrap(), [(0, Some(Verb::UnregisterHost))]);
    assert_eq!(registered_bytes(), before);
}

#[test]
fn memory_that_cannot_be_unregistered_is_never_freed_nor_registered_again() {
    let _alone = alone();
    let before = registered_bytes();
    let rig = Rig::eager();
    let log = Arc::new(Mutex::new(Vec::new()));
    let region = watched(&rig, 2, &log).share();
    let registered = register(&rig, Arc::clone(&region), 2, None).unwrap();
    rig.fail_ahead(Verb::UnregisterHost, &[0, 1]);
    drop(registered);
    assert_eq!(Arc::strong_count(&region), 2, "leaked on purpose");
    assert_eq!(registered_bytes(), before + Bytes(2 * PAGE));
    let again = register(&rig, Arc::clone(&region), 2, None).unwrap_err();
    assert!(matches!(again, HostError::AlreadyRegistered { .. }), "{again}");
    drop(region);
    assert!(log.lock().unwrap().is_empty());
}

#[test]
fn a_refused_registration_leaves_nothing() {
    let _alone = alone();
    let before = registered_bytes();
    let rig = Rig::eager();
    let region = Region::anonymous(4, 1).share();
    rig.fail_ahead(Verb::RegisterHost, &[0]);
    let refused = register(&rig, Arc::clone(&region), 4, None).unwrap_err();
    assert!(refused.to_string().contains("host page-lock of 16.00 KiB"), "{refused}");
    assert_eq!((registered_bytes(), Arc::strong_count(&region)), (before, 1));

    let misaligned = || {
        let (driver, address) = (Arc::clone(&rig.driver), region.address().wrapping_add(8));
        let keep: Vec<KeepAlive> = vec![Arc::<Region>::clone(&region)];
        // SAFETY: inside the region; refused in any case.
        unsafe { Registered::new(driver, address, Bytes(PAGE), Registration::ReadWrite, None, keep) }
    };
    assert!(matches!(misaligned(), Err(HostError::NotWholePages { .. })));
    assert!(matches!(register(&rig, Arc::clone(&region), 0, None), Err(HostError::NotWholePages { .. })));
    assert_eq!(rig.faulty.calls(Verb::RegisterHost), 1);
    assert_eq!(Arc::strong_count(&region), 1);
}

#[test]
fn registered_bytes_are_counted_over_all_stores_and_limited() {
    let _alone = alone();
    let rig = Rig::eager();
    let before = registered_bytes();
    let limit = Some(before + Bytes(6 * PAGE));
    let first = register(&rig, Region::anonymous(4, 1).share(), 4, limit).unwrap();
    assert_eq!(registered_bytes(), before + Bytes(4 * PAGE));
    let refused = register(&rig, Region::anonymous(3, 2).share(), 3, limit).unwrap_err();
    assert!(matches!(refused, HostError::RegisterLimit { .. }), "{refused}");

    // Within the limit one tensor more fits in place; the other stays pageable, and is still copied right.
    let options = StoreOptions { register_limit: limit, ..small_options() };
    let parts = [1, 2].map(|seed| Part::whole(Region::anonymous(2, seed)));
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(4 * PAGE), options);
    builder.place(&[parts[0].source(0, 0)]).unwrap();
    builder.place(&[parts[1].source(1, 2 * PAGE)]).unwrap();
    let store = builder.finish().unwrap();
    let levels = [0, 1].map(|id| store.placed(id).unwrap().level);
    assert_eq!(levels, [HostLevel::InPlace, HostLevel::Pageable]);
    assert_eq!(store.report().step_downs.len(), 2);
    let device = upload(&rig, 0..4 * PAGE, &store.runs(0..4 * PAGE));
    assert_eq!(device, [parts[0].expected(), parts[1].expected()].concat());
    drop((store, first));
    assert_eq!(registered_bytes(), before);
}

#[test]
fn many_threads_never_register_a_page_twice() {
    let _alone = alone();
    let rig = Rig::eager();
    let region = Region::anonymous(4, 1).share();
    let successes = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    match register(&rig, Arc::clone(&region), 4, None) {
                        Ok(registered) => {
                            successes.fetch_add(1, Ordering::Relaxed);
                            drop(registered);
                        }
                        Err(refused) => {
                            assert!(matches!(refused, HostError::AlreadyRegistered { .. }), "{refused}");
                        }
                    }
                }
            });
        }
    });
    assert!(successes.load(Ordering::Relaxed) >= 1);
    assert_eq!(rig.host.counters().registrations_alive, 0);
}

#[test]
fn the_maps_of_this_process_tell_memory_apart() {
    let regions = [
        (Region::anonymous(3, 1), MemoryKind::Anonymous),
        (Region::file(3, 1, MapFlags::PRIVATE), MemoryKind::PrivateFile),
        (Region::file(3, 1, MapFlags::SHARED), MemoryKind::SharedFile),
        (Region::read_only(3, 1), MemoryKind::Special),
    ];
    let maps = HostMaps::read().unwrap();
    for (region, kind) in regions {
        let start = region.address() as u64;
        assert_eq!(maps.kind(start..start + 3 * PAGE), kind);
    }
    let on_stack = std::ptr::from_ref(&maps) as u64;
    assert_ne!(maps.kind(on_stack..on_stack + 1), MemoryKind::PrivateFile);
    assert_eq!(maps.kind(0..PAGE), MemoryKind::Unmapped);
}
