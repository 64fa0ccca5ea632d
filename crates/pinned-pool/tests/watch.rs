//! Placing a model is followed byte by byte, ended at any point, and gives everything back.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use common::{Held, PAGE, Part, Region, Rig, alone, pattern, upload};
use gpu_driver::Bytes;
use pinned_pool::{
    FileBytes, HostError, HostStore, HostStoreBuilder, SourceFile, SourceTensor, StoreOptions, Watch, Work,
    registered_bytes,
};

const LINE: u64 = 256 * PAGE;

/// What a watch was told, by kind of work.
#[derive(Debug, Default)]
struct Told {
    filled: AtomicU64,
    cached: AtomicU64,
    locked: AtomicU64,
}

impl Told {
    fn of(&self, work: Work) -> &AtomicU64 {
        match work {
            Work::Filled => &self.filled,
            Work::Cached => &self.cached,
            Work::Locked => &self.locked,
        }
    }

    fn bytes(&self, work: Work) -> u64 {
        self.of(work).load(Ordering::SeqCst)
    }
}

fn reporting() -> (Arc<Told>, Watch) {
    let told = Arc::new(Told::default());
    let to = Arc::clone(&told);
    let watch = Watch::new().reports_to(move |work, bytes| {
        to.of(work).fetch_add(bytes.0, Ordering::SeqCst);
    });
    (told, watch)
}

fn options() -> StoreOptions {
    StoreOptions {
        min_in_place: Bytes(8 * PAGE),
        min_mapped: Bytes(PAGE),
        piece: Bytes(16 * PAGE),
        chunk: Bytes(8 * PAGE),
        threads: Some(2),
        ..StoreOptions::default()
    }
}

/// A model of 8 groups: two tensors that go to the slab, one that stays in place, one in a file.
struct Model {
    file: Arc<SourceFile>,
    _named: tempfile::NamedTempFile,
    held: Arc<Held>,
}

impl Model {
    fn new() -> Self {
        let mut named = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let bytes: Vec<u8> = (0..64 * PAGE).map(|at| pattern(77, at)).collect();
        named.write_all(&bytes).unwrap();
        Self { file: SourceFile::open(named.path()).unwrap(), _named: named, held: Arc::default() }
    }

    fn group(&self, group: u64) -> Vec<SourceTensor> {
        let region = |seed| Region::anonymous(8, seed).counted(&self.held).share();
        let (whole, parts) = (region(group), region(100 + group));
        let id = group as u32 * 4;
        let at = group * 32 * PAGE;
        vec![
            Part::new(&parts, 1..3 * PAGE).source(id, at),
            Part::new(&parts, 3 * PAGE..7 * PAGE).source(id + 1, at + 3 * PAGE),
            Part::new(&whole, 0..8 * PAGE).source(id + 2, at + 8 * PAGE),
            SourceTensor::new(
                id + 3,
                at + 16 * PAGE,
                FileBytes::new(&self.file, group * 8 * PAGE, Bytes(8 * PAGE)).unwrap(),
            ),
        ]
    }

    fn place(&self, builder: &mut HostStoreBuilder) -> Result<(), HostError> {
        (0..8).try_for_each(|group| builder.place(&self.group(group)).map(drop))
    }
}

/// Waits for what happens on other threads, for as long as a slow machine may need.
fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn every_byte_is_told_of_once() {
    let _alone = alone();
    let (rig, model, (told, watch)) = (Rig::eager(), Model::new(), reporting());
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options());
    builder.watch(watch);
    model.place(&mut builder).unwrap();
    let store = builder.finish().unwrap();
    let report = store.report();
    assert!(report.step_downs.is_empty(), "{report:?}");
    assert_eq!(report.in_place, Bytes(64 * PAGE));
    assert_eq!(told.bytes(Work::Filled), report.slab.0);
    assert_eq!(told.bytes(Work::Cached), report.mapped.0);
    assert_eq!(told.bytes(Work::Locked), report.registered.0);
    let device = upload(&rig, 0..LINE, &store.runs(0..LINE));
    for group in 0..8u64 {
        let at = |page: u64| ((group * 32 + page) * PAGE) as usize;
        assert!((0..8 * PAGE).all(|byte| device[at(8) + byte as usize] == pattern(group, byte)));
        assert!(
            (0..8 * PAGE).all(|byte| device[at(16) + byte as usize] == pattern(77, group * 8 * PAGE + byte))
        );
    }
}

#[test]
fn ended_at_any_point_it_gives_everything_back() {
    let _alone = alone();
    let before = registered_bytes();
    let mut ended = 0;
    for after in 0.. {
        let (rig, model) = (Rig::eager(), Model::new());
        let asked = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&asked);
        let watch = Watch::new().cancelled_by(move || count.fetch_add(1, Ordering::SeqCst) >= after);
        let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options());
        builder.watch(watch);
        let placed = model.place(&mut builder);
        let store = match placed {
            Ok(()) => builder.finish(),
            Err(error) => {
                drop(builder);
                Err(error)
            }
        };
        let done = store.is_ok();
        match store {
            Ok(store) => drop(store),
            Err(HostError::Cancelled) => ended += 1,
            Err(error) => panic!("{error}"),
        }
        eventually("memory stays locked", || registered_bytes() == before);
        eventually("sources stay alive", || model.held.bytes() == 0);
        eventually("registrations are left", || rig.host.counters().nothing_alive());
        if done {
            break;
        }
    }
    assert!(ended > 30, "{ended} points");
}

#[test]
fn what_is_filled_is_registered_while_the_rest_is_filled() {
    let _alone = alone();
    let (rig, held) = (Rig::eager(), Arc::new(Held::default()));
    let slab_only = StoreOptions { slab_only: true, ..options() };
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), slab_only);
    let mut all = Vec::new();
    for group in 0..8u64 {
        let part = Part::whole(Region::anonymous(32, group).counted(&held));
        builder.place(&[part.source(group as u32, group * 32 * PAGE)]).unwrap();
        all.extend(part.expected());
        eventually("the group's pages are not registered", || {
            rig.host.counters().registrations_alive > group
        });
    }
    let store = builder.finish().unwrap();
    assert_eq!(store.report().registered, Bytes(LINE));
    assert!(upload(&rig, 0..LINE, &store.runs(0..LINE)) == all);
}

#[test]
fn a_builder_that_is_dropped_stops_its_thread() {
    let _alone = alone();
    let (rig, model, before) = (Rig::eager(), Model::new(), registered_bytes());
    let mut builder = HostStore::builder(
        Arc::clone(&rig.driver),
        Bytes(LINE),
        StoreOptions { slab_only: true, ..options() },
    );
    model.place(&mut builder).unwrap();
    drop(builder);
    eventually("memory stays locked", || registered_bytes() == before);
    eventually("registrations are left", || rig.host.counters().nothing_alive());
}

#[test]
fn what_was_ended_is_not_refused_to_the_next_load() {
    let _alone = alone();
    let (rig, model) = (Rig::eager(), Model::new());
    let groups: Vec<_> = (0..8).map(|group| model.group(group)).collect();
    for after in 0..40 {
        let asked = Arc::new(AtomicU64::new(0));
        let watch = Watch::new().cancelled_by(move || asked.fetch_add(1, Ordering::SeqCst) >= after);
        let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options());
        builder.watch(watch);
        let ended = groups.iter().try_for_each(|group| builder.place(group).map(drop));
        drop(ended.and_then(|()| builder.finish()));
        let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options());
        for group in &groups {
            builder.place(group).unwrap();
        }
        let store = builder.finish().unwrap();
        assert_eq!(store.report().step_downs, [], "the same pages, at once");
        assert_eq!(store.report().in_place, Bytes(64 * PAGE));
        drop(store);
    }
}
