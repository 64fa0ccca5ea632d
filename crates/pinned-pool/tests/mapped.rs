//! Files page-locked where the page cache has them: what is locked, shared, checked and given back.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::fs::OpenOptions;
use std::io::Write;
use std::sync::Arc;

use common::{PAGE, Rig, alone, pattern, small_options, upload};
use gpu_driver::{Bytes, Verb};
use pinned_pool::{
    FileBytes, HostError, HostLevel, HostStore, Levels, LineRun, SourceFile, SourceTensor, StoreOptions,
    registered_bytes,
};

const LINE: u64 = 64 * PAGE;

/// A checkpoint of `pages` pages and 100 bytes.
struct Checkpoint {
    named: tempfile::NamedTempFile,
    bytes: Vec<u8>,
}

impl Checkpoint {
    fn new(pages: u64) -> Self {
        let bytes: Vec<u8> = (0..pages * PAGE + 100).map(|at| pattern(9, at)).collect();
        let mut named = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        named.write_all(&bytes).unwrap();
        Self { named, bytes }
    }

    fn open(&self) -> Arc<SourceFile> {
        SourceFile::open(self.named.path()).unwrap()
    }
}

/// Two tensors that touch, away from the borders of pages, and one far from them.
const TENSORS: [(u64, u64, u64); 3] =
    [(0, 1003, 3 * PAGE), (20 * PAGE, 1003 + 3 * PAGE, 5000), (40 * PAGE, 10 * PAGE + 7, 2 * PAGE)];

fn sources(file: &Arc<SourceFile>) -> Vec<SourceTensor> {
    let source = |(id, (line, offset, size)): (u32, (u64, u64, u64))| {
        SourceTensor::new(id, line, FileBytes::new(file, offset, Bytes(size)).unwrap())
    };
    (0u32..).zip(TENSORS).map(source).collect()
}

fn options() -> StoreOptions {
    StoreOptions { min_mapped: Bytes(PAGE), ..small_options() }
}

fn store(rig: &Rig, file: &Arc<SourceFile>, options: StoreOptions) -> HostStore {
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options);
    builder.place(&sources(file)).unwrap();
    builder.finish().unwrap()
}

fn levels(store: &HostStore) -> [HostLevel; 3] {
    [0, 1, 2].map(|id| store.placed(id).unwrap().level)
}

/// Every byte arrives, through the copy engine if it is locked and by reading otherwise.
fn check_bytes(rig: &Rig, store: &HostStore, checkpoint: &Checkpoint) {
    let runs = store.runs(0..LINE);
    let device = upload(rig, 0..LINE, &runs);
    for ((line, offset, size), id) in TENSORS.into_iter().zip(0..) {
        let expected = &checkpoint.bytes[offset as usize..][..size as usize];
        let locked = !matches!(store.placed(id).unwrap().level, HostLevel::File | HostLevel::Pageable);
        if locked {
            assert_eq!(&device[line as usize..][..size as usize], expected, "tensor {id}");
        }
        let mut read = vec![0; size as usize];
        store.source_of(id).unwrap().read_at(0, &mut read).unwrap();
        assert_eq!(read, expected, "tensor {id}");
        let runs = store.line_runs(line..line + size);
        assert_eq!(runs.iter().map(LineRun::size).sum::<Bytes>(), Bytes(size));
        assert!(runs.iter().all(|run| matches!(run, LineRun::Locked(_)) == locked), "{runs:?}");
    }
}

#[test]
fn tensors_are_locked_where_the_page_cache_has_them() {
    let _alone = alone();
    let before = registered_bytes();
    let (rig, checkpoint) = (Rig::eager(), Checkpoint::new(16));
    let store = store(&rig, &checkpoint.open(), options());
    assert_eq!(levels(&store), [HostLevel::Mapped; 3]);
    let report = store.report();
    assert_eq!(report.mapped, Bytes(5 * PAGE + 5000));
    // Pages 0 to 4 in one run, pages 10 to 12 in another.
    assert_eq!((report.registrations, report.registered), (2, Bytes(8 * PAGE)));
    assert!(report.step_downs.is_empty(), "{report:?}");
    assert!(!store.placed(0).unwrap().is_copied());
    assert!(store.bytes_of(0).is_none(), "nobody reads the mapping");
    assert_eq!(registered_bytes(), before + Bytes(8 * PAGE));
    check_bytes(&rig, &store, &checkpoint);
    store.check_unchanged().unwrap();
    drop(store);
    assert_eq!(registered_bytes(), before);
    assert!(rig.host.counters().nothing_alive());
}

#[test]
fn two_stores_share_a_file_and_it_counts_once() {
    let _alone = alone();
    let before = registered_bytes();
    let (rig, checkpoint) = (Rig::eager(), Checkpoint::new(16));
    // Opened twice: it is the same file all the same.
    let first = store(&rig, &checkpoint.open(), options());
    let second = store(&rig, &checkpoint.open(), options());
    assert_eq!(rig.faulty.calls(Verb::RegisterHost), 2);
    assert_eq!(registered_bytes(), before + Bytes(8 * PAGE));
    assert_eq!(second.report().registered, Bytes(8 * PAGE), "each names what it uses");
    drop(first);
    check_bytes(&rig, &second, &checkpoint);
    assert_eq!(registered_bytes(), before + Bytes(8 * PAGE));
    drop(second);
    assert_eq!(registered_bytes(), before);
    let third = store(&rig, &checkpoint.open(), options());
    assert_eq!(levels(&third), [HostLevel::Mapped; 3]);
    check_bytes(&rig, &third, &checkpoint);
}

#[test]
fn a_page_of_two_groups_is_locked_once() {
    let _alone = alone();
    let (rig, checkpoint) = (Rig::eager(), Checkpoint::new(16));
    let file = checkpoint.open();
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options());
    for source in sources(&file) {
        builder.place(&[source]).unwrap();
    }
    let store = builder.finish().unwrap();
    assert_eq!(levels(&store), [HostLevel::Mapped; 3]);
    // The second tensor begins on the last page of the first, which is registered with it.
    assert_eq!(store.report().registered, Bytes(8 * PAGE));
    assert_eq!(store.line_runs(20 * PAGE..22 * PAGE).len(), 2, "cut between the registrations");
    check_bytes(&rig, &store, &checkpoint);
}

#[test]
fn a_changed_file_is_a_typed_error_and_no_dead_process() {
    let _alone = alone();
    let (rig, checkpoint) = (Rig::eager(), Checkpoint::new(16));
    let file = checkpoint.open();
    let locked = store(&rig, &file, options());
    let whole = checkpoint.bytes.len() as u64;
    OpenOptions::new().write(true).open(checkpoint.named.path()).unwrap().set_len(2 * PAGE).unwrap();
    let changed = locked.check_unchanged().unwrap_err();
    let named = (checkpoint.named.path(), Bytes(whole), Bytes(2 * PAGE));
    assert!(
        matches!(&changed, HostError::FileChanged { path, before, after, .. } if (path.as_path(), *before, *after) == named),
        "{changed}"
    );
    assert!(changed.to_string().contains("load the model again"), "{changed}");
    // Copies that are in flight all the same end, and what has gone is no plausible number.
    let device = upload(&rig, 0..LINE, &locked.runs(0..LINE));
    assert_eq!(device[..1000], checkpoint.bytes[1003..2003]);
    assert_eq!(device[40 * PAGE as usize..][..100], [0xFF; 100]);
    let mut read = [0; 8];
    assert!(matches!(locked.source_of(2).unwrap().read_at(0, &mut read), Err(HostError::FileChanged { .. })));
    // Neither is it placed anew.
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options());
    assert!(matches!(builder.place(&sources(&file)), Err(HostError::FileChanged { .. })));
    let mut builder = HostStore::builder(
        Arc::clone(&rig.driver),
        Bytes(LINE),
        StoreOptions { slab_only: true, ..options() },
    );
    let refused = builder.place(&sources(&file)).unwrap_err();
    assert!(matches!(refused, HostError::FileChanged { .. }), "{refused}");
    assert!(builder.finish().unwrap().placed(0).is_none(), "nothing of the group was placed");
}

#[test]
fn where_mapping_is_not_allowed_files_are_read_into_the_slab() {
    let _alone = alone();
    let (rig, checkpoint) = (Rig::eager(), Checkpoint::new(16));
    let levels_of = |levels| StoreOptions { levels, ..options() };
    let no_mapping = levels_of(Levels { mapped: false, ..Levels::ALL });
    for options in [StoreOptions { slab_only: true, ..options() }, no_mapping] {
        let store = store(&rig, &checkpoint.open(), options);
        assert_eq!(levels(&store), [HostLevel::Slab; 3]);
        assert!(store.placed(1).unwrap().is_copied());
        check_bytes(&rig, &store, &checkpoint);
    }
    let none = store(&rig, &checkpoint.open(), levels_of(Levels::NONE));
    assert_eq!(levels(&none), [HostLevel::File; 3]);
    assert_eq!(none.report().in_files, Bytes(5 * PAGE + 5000));
    assert_eq!(none.report().registrations, 0);
    check_bytes(&rig, &none, &checkpoint);
}

#[test]
fn short_runs_go_to_the_slab_and_single_tensors_stay_unlocked() {
    let _alone = alone();
    let (rig, checkpoint) = (Rig::eager(), Checkpoint::new(16));
    let short = store(&rig, &checkpoint.open(), StoreOptions { min_mapped: Bytes(4 * PAGE), ..options() });
    assert_eq!(levels(&short), [HostLevel::Mapped, HostLevel::Mapped, HostLevel::Slab]);
    check_bytes(&rig, &short, &checkpoint);

    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options());
    let mut group = sources(&checkpoint.open());
    group[0] = group[0].clone().unlocked();
    builder.place(&group).unwrap();
    let store = builder.finish().unwrap();
    assert_eq!(levels(&store), [HostLevel::File, HostLevel::Mapped, HostLevel::Mapped]);
    check_bytes(&rig, &store, &checkpoint);
}

#[test]
fn a_refused_lock_steps_down_to_the_slab_and_beyond() {
    let _alone = alone();
    let (rig, checkpoint) = (Rig::eager(), Checkpoint::new(16));
    // The first run's pages at every size, then the slab is taken.
    rig.fail_ahead(Verb::RegisterHost, &[0, 1, 2]);
    let some = store(&rig, &checkpoint.open(), options());
    assert_eq!(levels(&some), [HostLevel::Slab, HostLevel::Slab, HostLevel::Mapped]);
    let step = &some.report().step_downs[0];
    assert_eq!((step.from, step.to, step.times), (HostLevel::Mapped, HostLevel::Slab, 1));
    check_bytes(&rig, &some, &checkpoint);
    drop(some);

    rig.faulty.refuse_registrations_above(Bytes::ZERO);
    let none = store(&rig, &checkpoint.open(), options());
    assert_eq!(levels(&none), [HostLevel::Pageable; 3], "read into the slab, which was refused as well");
    check_bytes(&rig, &none, &checkpoint);
    let without_slab = Levels { slab: false, ..Levels::ALL };
    let none = store(&rig, &checkpoint.open(), StoreOptions { levels: without_slab, ..options() });
    assert_eq!(levels(&none), [HostLevel::File; 3]);
    assert_eq!(none.report().step_downs[0].to, HostLevel::File);
    check_bytes(&rig, &none, &checkpoint);
}

#[test]
fn without_a_budget_no_file_is_locked_or_copied() {
    let _alone = alone();
    let (rig, checkpoint) = (Rig::eager(), Checkpoint::new(16));
    let store =
        store(&rig, &checkpoint.open(), StoreOptions { register_limit: Some(Bytes::ZERO), ..options() });
    assert_eq!(levels(&store), [HostLevel::File; 3]);
    assert_eq!(rig.faulty.calls(Verb::RegisterHost), 0);
    let step = &store.report().step_downs[0];
    assert!(matches!(step.reason, HostError::RegisterLimit { .. }), "{}", step.reason);
}

#[test]
fn half_a_tensor_is_not_locked_in_vain() {
    let _alone = alone();
    let (rig, checkpoint, before) = (Rig::eager(), Checkpoint::new(16), registered_bytes());
    // The first tensor of four pages is locked page by page until the limit; the third, of three, fits.
    let limit = Some(before + Bytes(3 * PAGE));
    let options = StoreOptions { register_limit: limit, piece: Bytes(PAGE), ..options() };
    let store = store(
        &rig,
        &checkpoint.open(),
        StoreOptions { levels: Levels { slab: false, ..Levels::ALL }, ..options },
    );
    assert_eq!(levels(&store), [HostLevel::File, HostLevel::File, HostLevel::Mapped]);
    assert_eq!((store.report().registered, registered_bytes()), (Bytes(3 * PAGE), before + Bytes(3 * PAGE)));
    check_bytes(&rig, &store, &checkpoint);
}
