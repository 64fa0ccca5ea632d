//! How much is really locked, and what happens when it is refused: at a call, always, above a size, with an error left
//! pending, by a limit.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{PAGE, Part, Region, Rig, alone, upload};
use gpu_driver::{Bytes, DriverError, Verb};
use pinned_pool::{HostBytes, HostError, HostLevel, HostStore, SourceTensor, StoreOptions, registered_bytes};
use rustix::mm::MapFlags;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

const MIB: u64 = 1 << 20;

fn options(limit: Option<Bytes>) -> StoreOptions {
    StoreOptions {
        register_limit: limit,
        threads: Some(2),
        chunk: Bytes(8 * PAGE),
        ..StoreOptions::default()
    }
}

/// A store with one tensor of `bytes` bytes.
fn store(rig: &Rig, bytes: u64, options: StoreOptions) -> HostStore {
    let tensor = Arc::new((0..bytes).map(|at| common::pattern(3, at)).collect::<Vec<u8>>());
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(bytes), options);
    builder.place(&[SourceTensor::new(0, 0, HostBytes::of(&tensor))]).unwrap();
    builder.finish().unwrap()
}

fn level(store: &HostStore) -> HostLevel {
    store.placed(0).unwrap().level
}

fn check_bytes(rig: &Rig, store: &HostStore, bytes: u64) {
    let device = upload(rig, 0..bytes, &store.runs(0..bytes));
    assert!((0..bytes).all(|at| device[at as usize] == common::pattern(3, at)));
}

#[test]
fn what_is_locked_is_what_was_asked_for() {
    let _alone = alone();
    let (rig, before) = (Rig::eager(), registered_bytes());
    // Rounded up to powers of two, as some allocators do, 34 of 1.2 MiB would take 68 MiB.
    let size = 12 * MIB / 10;
    let limit = before + Bytes::mib(60);
    let stores: Vec<_> = (0..34).map(|_| store(&rig, size, options(Some(limit)))).collect();
    assert!(
        stores.iter().all(|store| level(store) == HostLevel::Slab && store.report().step_downs.is_empty())
    );
    let locked = registered_bytes() - before;
    assert!(locked.0 as f64 <= 1.03 * (34 * size) as f64, "{locked}");
    assert_eq!(stores.iter().map(|store| store.report().registered).sum::<Bytes>(), locked);
    drop(stores);
    assert_eq!(registered_bytes(), before);
    for mib in [9, 36, 96] {
        let store = store(&rig, mib * MIB, options(None));
        // In place, the page that the allocation begins on is one more.
        assert!(registered_bytes() - before <= Bytes(mib * MIB + PAGE));
        assert_eq!(store.report().step_downs, []);
        drop(store);
    }
    assert_eq!(registered_bytes(), before);
    assert!(rig.host.counters().nothing_alive());
}

#[test]
fn the_limit_is_reached_and_never_passed() {
    let _alone = alone();
    let (rig, before) = (Rig::eager(), registered_bytes());
    let limit = before + Bytes::mib(5);
    let stores: Vec<_> = (0..6).map(|_| store(&rig, MIB + 100, options(Some(limit)))).collect();
    // Each takes 257 pages, so that four fit.
    let levels: Vec<_> = stores.iter().map(level).collect();
    assert_eq!(levels, [[HostLevel::Slab; 4].as_slice(), &[HostLevel::Pageable; 2]].concat());
    assert!(registered_bytes() <= limit);
    let left = &stores[5];
    assert!(!left.placed(0).unwrap().is_copied(), "what cannot be locked is not copied either");
    let step = &left.report().step_downs[0];
    assert_eq!((step.from, step.to, step.times), (HostLevel::Slab, HostLevel::Pageable, 1));
    assert!(matches!(step.reason, HostError::RegisterLimit { .. }), "{}", step.reason);
    check_bytes(&rig, left, MIB + 100);
    drop(stores);
    assert_eq!(registered_bytes(), before);
}

#[test]
fn nothing_is_locked_without_a_budget() {
    let _alone = alone();
    let (rig, before) = (Rig::eager(), registered_bytes());
    let store = store(&rig, 3 * MIB, options(Some(Bytes::ZERO)));
    assert_eq!((level(&store), registered_bytes()), (HostLevel::Pageable, before));
    assert_eq!(rig.faulty.calls(Verb::RegisterHost), 0, "the driver is not even asked");
    check_bytes(&rig, &store, 3 * MIB);
    let part = Part::whole(Region::anonymous(8192, 1));
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes::mib(32), options(Some(Bytes::ZERO)));
    let placed = builder.place(&[part.source(0, 0)]).unwrap();
    assert_eq!((placed[0].level, placed[0].is_copied()), (HostLevel::Pageable, false));
}

#[test]
fn a_driver_that_refuses_large_pieces_is_given_small_ones() {
    let _alone = alone();
    let (rig, before) = (Rig::eager(), registered_bytes());
    rig.faulty.refuse_registrations_above(Bytes(16 * PAGE));
    let store = store(&rig, 3 * MIB, options(None));
    assert_eq!(level(&store), HostLevel::Slab);
    assert_eq!((store.report().registered, registered_bytes()), (Bytes::mib(3), before + Bytes::mib(3)));
    assert!(store.report().step_downs.is_empty());
    check_bytes(&rig, &store, 3 * MIB);
    drop(store);
    assert_eq!(registered_bytes(), before);
}

#[test]
fn a_refusal_at_any_call_leaves_every_byte_right() {
    let _alone = alone();
    let before = registered_bytes();
    for call in 0..12 {
        for last in [call, 1000] {
            let rig = Rig::eager();
            (call..=last).for_each(|index| rig.faulty.fail(Verb::RegisterHost, index));
            rig.faulty.fail(Verb::MemoryInfo, 1);
            // Cut into pieces of 64 pages from the start.
            let options = StoreOptions { piece: Bytes(64 * PAGE), ..options(None) };
            let store = store(&rig, MIB, options);
            let report = store.report();
            assert_eq!(report.slab + report.pageable, Bytes(MIB));
            assert_eq!(registered_bytes(), before + report.registered);
            check_bytes(&rig, &store, MIB);
            drop(store);
            assert_eq!(registered_bytes(), before);
            assert!(rig.host.counters().nothing_alive());
        }
    }
}

#[test]
fn no_later_call_reports_an_old_refusal() {
    let _alone = alone();
    let rig = Rig::eager();
    let refusal = || DriverError::Call {
        call: "cuMemHostRegister",
        code: 2,
        name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
        detail: String::new(),
    };
    for index in 0..100 {
        rig.faulty.fail_pending(Verb::RegisterHost, index, refusal());
    }
    let store = store(&rig, MIB, options(None));
    assert_eq!(level(&store), HostLevel::Pageable);
    assert!(!rig.faulty.is_pending());
    check_bytes(&rig, &store, MIB);
    let reason = store.report().step_downs[0].reason.to_string();
    assert!(reason.starts_with("host page-lock of"), "{reason}");
    assert!(!reason.to_lowercase().contains("vram"), "{reason}");
    assert!(reason.contains("about RAM alone"), "{reason}");
}

#[test]
fn a_read_only_mapping_of_a_file_is_copied_and_never_registered() {
    let _alone = alone();
    for flags in [MapFlags::PRIVATE, MapFlags::SHARED] {
        let rig = Rig::eager();
        let part = Part::whole(Region::file(8192, 5, flags).protected());
        let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes::mib(32), options(None));
        builder.place(&[part.source(0, 0)]).unwrap();
        assert_eq!(rig.faulty.calls(Verb::RegisterHost), 0, "the mapping itself was not tried");
        let store = builder.finish().unwrap();
        assert_eq!(level(&store), HostLevel::Slab);
        assert_ne!(store.bytes_of(0).unwrap().address(), part.region.address().cast_const());
    }
}

/// Counts warnings that speak of page-locking.
struct Warnings(Arc<AtomicU64>);

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN && metadata.target().starts_with("pinned_pool")
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn dozens_of_refusals_warn_once() {
    let _alone = alone();
    let rig = Rig::eager();
    rig.faulty.refuse_registrations_above(Bytes::ZERO);
    let warnings = Arc::new(AtomicU64::new(0));
    tracing::subscriber::with_default(Warnings(Arc::clone(&warnings)), || {
        for _ in 0..34 {
            let store = store(&rig, MIB, options(None));
            assert_eq!(store.report().step_downs.len(), 1);
        }
    });
    // Another test of this process may have had the one warning.
    assert!(warnings.load(Ordering::SeqCst) <= 1);
}
