//! Which memory stays in place, which goes to the slab, and how it is copied from there.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::{Held, PAGE, Part, Region, Rig, small_options, upload};
use gpu_driver::{Bytes, Registration, Verb};
use pinned_pool::{HostError, HostLevel, HostStore, SourceTensor, StoreOptions};
use rustix::mm::MapFlags;

const LINE: u64 = 64 * PAGE;

fn levels(store: &HostStore, count: u32) -> Vec<HostLevel> {
    (0..count).map(|id| store.placed(id).unwrap().level).collect()
}

/// One tensor in a store of its own.
fn place_one(rig: &Rig, part: &Part, options: StoreOptions) -> HostStore {
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options);
    builder.place(&[part.source(0, 512)]).unwrap();
    let store = builder.finish().unwrap();
    let runs = store.runs(0..LINE);
    let device = upload(rig, 0..LINE, &runs);
    let expected = part.expected();
    assert_eq!(device[512..512 + expected.len()], expected[..]);
    assert!(device[..512].iter().all(|&byte| byte == 0xAA), "nothing else is copied");
    assert_eq!(store.bytes_of(0).unwrap().as_slice(), expected);
    store
}

#[test]
fn anonymous_memory_of_the_shortest_length_stays_in_place() {
    let rig = Rig::eager();
    let part = Part::whole(Region::anonymous(4, 1));
    let store = place_one(&rig, &part, small_options());
    assert_eq!(levels(&store, 1), [HostLevel::InPlace]);
    assert_eq!(store.bytes_of(0).unwrap().address(), part.region.address().cast_const());
    assert_eq!(rig.host.counters().registrations_alive, 1);
    assert!(store.report().step_downs.is_empty());
}

#[test]
fn everything_else_is_copied_into_a_registered_slab() {
    let short = Region::anonymous(1, 2);
    let private = Region::file(4, 3, MapFlags::PRIVATE);
    let shared = Region::file(4, 4, MapFlags::SHARED);
    for region in [short, private, shared, Region::read_only(4, 5)] {
        let rig = Rig::eager();
        let part = Part::whole(region);
        let store = place_one(&rig, &part, small_options());
        assert_eq!(levels(&store, 1), [HostLevel::Slab]);
        assert_ne!(store.bytes_of(0).unwrap().address(), part.region.address().cast_const());
        assert!(store.report().step_downs.is_empty(), "no refusal: it was never a candidate");
        assert_eq!(store.report().slab, store.bytes_of(0).unwrap().size());
    }
}

#[test]
fn by_default_less_than_32_mib_is_copied() {
    let rig = Rig::eager();
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes::mib(80), StoreOptions::default());
    let (short, long) = (Part::whole(Region::anonymous(8191, 1)), Part::whole(Region::anonymous(8192, 2)));
    // Kept apart, or the kernel might lay them side by side.
    builder.place(&[short.source(0, 0)]).unwrap();
    builder.place(&[long.source(1, 32 << 20)]).unwrap();
    assert_eq!(levels(&builder.finish().unwrap(), 2), [HostLevel::Slab, HostLevel::InPlace]);
}

#[test]
fn a_vector_is_copied_and_may_be_dropped_at_once() {
    let rig = Rig::eager();
    let bytes: Vec<u8> = (0..=255).collect();
    let vector = Arc::new(bytes.clone());
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), StoreOptions::default());
    let placed = builder.place(&[SourceTensor::new(0, 0, pinned_pool::HostBytes::of(&vector))]).unwrap();
    assert!(placed[0].is_copied());
    assert_eq!(placed[0].level, HostLevel::Pageable, "registered once the store is finished");
    assert_eq!(Arc::strong_count(&vector), 1);
    drop(vector);
    let store = builder.finish().unwrap();
    assert_eq!(levels(&store, 1), [HostLevel::Slab]);
    assert_eq!(store.bytes_of(0).unwrap().as_slice(), bytes);
}

#[test]
fn the_slab_can_be_forced() {
    let rig = Rig::eager();
    let part = Part::whole(Region::anonymous(8, 1));
    let store = place_one(&rig, &part, StoreOptions { slab_only: true, ..small_options() });
    assert_eq!(levels(&store, 1), [HostLevel::Slab]);
}

#[test]
fn tensors_that_share_pages_are_registered_once() {
    let rig = Rig::eager();
    let region = Region::anonymous(4, 1).share();
    let parts = [0..PAGE + 100, PAGE + 100..PAGE + 600, PAGE + 600..4 * PAGE];
    let parts = parts.map(|range| Part::new(&region, range));
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    let sources: Vec<_> =
        parts.iter().zip(0u32..).map(|(part, id)| part.source(id, u64::from(id) * 8 * PAGE)).collect();
    builder.place(&sources).unwrap();
    let store = builder.finish().unwrap();
    assert_eq!(levels(&store, 3), [HostLevel::InPlace; 3]);
    let report = store.report();
    assert_eq!((report.registrations, report.registered), (1, Bytes(4 * PAGE)));
    assert_eq!(rig.host.counters().registrations_alive, 1);
    assert_eq!(store.runs(0..LINE).len(), 3);
}

#[test]
fn a_tensor_with_a_page_that_an_earlier_group_registered_is_copied() {
    let rig = Rig::eager();
    let region = Region::anonymous(8, 1).share();
    // The groups meet in the middle of page 3.
    let (one, two) = (Part::new(&region, 0..3 * PAGE + 1000), Part::new(&region, 3 * PAGE + 1000..8 * PAGE));
    let view = Part::new(&region, PAGE + 7..3 * PAGE + 900);
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    builder.place(&[one.source(0, 0)]).unwrap();
    builder.place(&[two.source(1, 16 * PAGE), view.source(2, 32 * PAGE)]).unwrap();
    let store = builder.finish().unwrap();
    assert_eq!(levels(&store, 3), [HostLevel::InPlace, HostLevel::Slab, HostLevel::InPlace]);
    assert_eq!(store.report().registered, Bytes(4 * PAGE + 5 * PAGE));
    assert!(store.report().step_downs.is_empty(), "no refusal: it was never a candidate");
    assert_eq!(store.runs(0..LINE).len(), 3, "no tensor lies in two registrations");
    let device = upload(&rig, 0..LINE, &store.runs(0..LINE));
    for (part, offset) in [(one, 0), (two, 16), (view, 32)] {
        assert_eq!(device[offset * PAGE as usize..][..part.expected().len()], part.expected());
    }
}

#[test]
fn a_slab_is_registered_at_once_and_in_parts_if_that_is_refused() {
    let options = StoreOptions { slab_only: true, ..small_options() };
    // Refused never, as a whole, the second part once more, and from the second part on. Parts of eight pages hold two
    // tensors of three, smaller ones one.
    let cases = [(vec![], 1, 9), (vec![0], 5, 9), (vec![0, 2], 8, 9), (vec![0, 2, 3, 4], 1, 2)];
    for (refused, registrations, right) in cases {
        let rig = Rig::eager();
        let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options.clone());
        let parts: Vec<Part> = (0..9).map(|seed| Part::whole(Region::anonymous(3, seed))).collect();
        for (part, id) in parts.iter().zip(0u32..) {
            builder.place(&[part.source(id, u64::from(id) * 3 * PAGE)]).unwrap();
            assert_eq!(rig.host.counters().registrations_alive, 0);
        }
        rig.fail_ahead(Verb::RegisterHost, &refused);
        let store = builder.finish().unwrap();
        assert_eq!(store.report().registrations, registrations);
        let expected: Vec<_> =
            (0..9).map(|id| if id < right { HostLevel::Slab } else { HostLevel::Pageable }).collect();
        assert_eq!(levels(&store, 9), expected);
        assert_eq!(store.report().step_downs.len(), usize::from(right < 9));
        let device = upload(&rig, 0..27 * PAGE, &store.runs(0..27 * PAGE));
        assert!(device == parts.iter().flat_map(Part::expected).collect::<Vec<u8>>());
    }
}

#[test]
fn two_stores_never_register_the_same_pages() {
    let rig = Rig::eager();
    let part = Part::whole(Region::anonymous(4, 1));
    let first = place_one(&rig, &part, small_options());
    let second = place_one(&rig, &part, small_options());
    assert_eq!(levels(&second, 1), [HostLevel::Slab]);
    let step = &second.report().step_downs[0];
    assert_eq!((step.from, step.to, step.times), (HostLevel::InPlace, HostLevel::Slab, 1));
    assert!(matches!(step.reason, HostError::AlreadyRegistered { .. }), "{}", step.reason);
    drop((first, second));
    let third = place_one(&rig, &part, small_options());
    assert_eq!(levels(&third, 1), [HostLevel::InPlace], "free again once the first store is gone");
}

#[test]
#[allow(unsafe_code, reason = "a registration behind the store's back")]
fn memory_that_someone_else_registered_is_copied() {
    let rig = Rig::eager();
    let part = Part::whole(Region::anonymous(4, 1));
    let address = part.region.address();
    // SAFETY: whole pages of the region, which outlives the registration.
    unsafe { rig.driver.register_host(address, Bytes(PAGE), Registration::ReadWrite) }.unwrap();
    let store = place_one(&rig, &part, small_options());
    assert_eq!(levels(&store, 1), [HostLevel::Slab]);
    assert!(matches!(store.report().step_downs[0].reason, HostError::Register { .. }));
    // SAFETY: registered above; no copy reads it.
    unsafe { rig.driver.unregister_host(address) }.unwrap();
}

#[test]
fn a_refused_registration_steps_down_and_says_so_once() {
    let rig = Rig::eager();
    let parts = [1, 2, 3].map(|seed| Part::whole(Region::anonymous(3, seed)));
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    rig.fail_ahead(Verb::RegisterHost, &[0, 1, 3]);
    for (part, id) in parts.iter().zip(0u32..) {
        builder.place(&[part.source(id, u64::from(id) * 4 * PAGE)]).unwrap();
    }
    let store = builder.finish().unwrap();
    assert_eq!(levels(&store, 3), [HostLevel::Pageable, HostLevel::Pageable, HostLevel::InPlace]);
    let report = store.report();
    let steps: Vec<_> = report.step_downs.iter().map(|step| (step.from, step.to, step.times)).collect();
    let expected = [(HostLevel::InPlace, HostLevel::Slab, 2), (HostLevel::Slab, HostLevel::Pageable, 1)];
    assert_eq!(steps, expected);
    assert_eq!(report.in_place + report.pageable, Bytes(9 * PAGE));
    let device = upload(&rig, 0..LINE, &store.runs(0..LINE));
    for (part, start) in parts.iter().zip([0, 4 * PAGE as usize, 8 * PAGE as usize]) {
        assert_eq!(device[start..start + part.expected().len()], part.expected());
    }
    drop(store);
    assert!(rig.host.counters().nothing_alive());
}

#[test]
fn a_unit_in_the_slab_is_one_run_padding_included() {
    let rig = Rig::eager();
    let options = StoreOptions { slab_only: true, ..small_options() };
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options);
    let region = Region::anonymous(8, 1).share();
    // Dense but for the padding to multiples of 512.
    let parts = [0..5000, 6000..6100, 7000..12000].map(|range| Part::new(&region, range));
    let offsets = [512, 512 + 5120, 512 + 5120 + 512];
    let sources: Vec<_> =
        parts.iter().zip(0u32..).map(|(part, id)| part.source(id, offsets[id as usize])).collect();
    builder.place(&sources).unwrap();
    let far = Part::whole(Region::anonymous(1, 2));
    builder.place(&[far.source(3, 40 * PAGE)]).unwrap();
    let store = builder.finish().unwrap();

    let whole = store.runs(0..LINE);
    assert_eq!(whole.len(), 2, "{whole:?}");
    assert_eq!((whole[0].offset(), whole[0].bytes().size().0), (512, 5120 + 512 + 5000));
    assert_eq!(whole[1].offset(), 40 * PAGE);
    // Any stretch of the line, also one that begins and ends inside tensors.
    let part = store.runs(1000..6000);
    assert_eq!((part.len(), part[0].offset(), part[0].bytes().size().0), (1, 1000, 5732 - 1000));
    assert!(store.runs(5600..5620).is_empty(), "only padding");
    assert!(store.runs(20 * PAGE..30 * PAGE).is_empty());
    assert!(store.runs(700..700).is_empty());
    let middle = upload(&rig, 1000..6000, &part);
    assert_eq!(middle[..5512 - 1000], parts[0].expected()[488..]);
}

#[test]
fn sources_are_let_go_group_by_group() {
    let rig = Rig::eager();
    let held = Arc::new(Held::default());
    let options = StoreOptions { slab_only: true, ..small_options() };
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options);
    for group in 0..5u32 {
        let parts = [0, 1]
            .map(|tensor| Part::whole(Region::anonymous(4, u64::from(group * 2 + tensor)).counted(&held)));
        let sources = parts
            .iter()
            .zip(0u32..)
            .map(|(part, id)| part.source(group * 2 + id, u64::from(group * 2 + id) * 4 * PAGE));
        builder.place(&sources.collect::<Vec<_>>()).unwrap();
        assert_eq!(held.bytes(), 8 * PAGE, "one group");
        drop(parts);
        assert_eq!(held.bytes(), 0, "nothing of a group is held once it is copied");
    }
    let store = builder.finish().unwrap();
    assert_eq!(store.report().slab, Bytes(40 * PAGE));
    for id in 0..10 {
        let expected: Vec<u8> = (0..4 * PAGE).map(|at| common::pattern(u64::from(id), at)).collect();
        assert_eq!(store.bytes_of(id).unwrap().as_slice(), expected);
    }
}

#[test]
fn host_bytes_outlive_the_store_and_its_registration() {
    let rig = Rig::eager();
    let held = Arc::new(Held::default());
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    let stays = Part::whole(Region::anonymous(4, 1).counted(&held));
    let moves = Part::whole(Region::file(4, 2, MapFlags::PRIVATE).counted(&held));
    builder.place(&[stays.source(0, 0), moves.source(1, 8 * PAGE)]).unwrap();
    let expected = [stays.expected(), moves.expected()];
    drop((stays, moves));
    let store = builder.finish().unwrap();
    assert_eq!(held.bytes(), 4 * PAGE);
    let bytes = [0, 1].map(|id| store.bytes_of(id).unwrap().clone());
    drop(store);
    assert!(rig.host.counters().nothing_alive(), "unregistered");
    assert_eq!(bytes[0].as_slice(), expected[0]);
    assert_eq!(bytes[1].as_slice(), expected[1]);
    drop(bytes);
    assert_eq!(held.bytes(), 0);
}

#[test]
fn wrong_groups_are_refused_whole() {
    let rig = Rig::eager();
    let part = Part::whole(Region::anonymous(4, 1));
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    builder.place(&[part.source(0, 4 * PAGE)]).unwrap();
    let other = || Part::whole(Region::anonymous(4, 2));
    let cases: Vec<(Vec<SourceTensor>, &str)> = vec![
        (vec![other().source(1, LINE - 4 * PAGE + 1)], "outside the line"),
        (vec![other().source(1, u64::MAX - 5)], "outside the line"),
        (vec![other().source(0, 0)], "placed already"),
        (vec![other().source(1, 0), other().source(1, 20 * PAGE)], "placed already"),
        (vec![other().source(1, 4 * PAGE - 1), other().source(2, 20 * PAGE)], "overlap"),
        (vec![other().source(1, 8 * PAGE - 1)], "overlap"),
        (vec![other().source(1, 4 * PAGE)], "overlap"),
        (vec![other().source(1, 20 * PAGE), other().source(2, 23 * PAGE)], "overlap"),
    ];
    let registered = rig.faulty.calls(Verb::RegisterHost);
    for (group, text) in cases {
        let refused = builder.place(&group).unwrap_err().to_string();
        assert!(refused.contains(text), "{refused}");
    }
    assert_eq!(rig.faulty.calls(Verb::RegisterHost), registered);
    builder.place(&[other().source(1, 8 * PAGE)]).unwrap();
    let store = builder.finish().unwrap();
    assert_eq!(store.report().in_place, Bytes(8 * PAGE));
    assert!(store.placed(2).is_none());
}

#[test]
fn empty_tensors_take_no_room() {
    let rig = Rig::eager();
    let part = Part::whole(Region::anonymous(4, 1));
    let empty = |id, offset| Part::new(&part.region, 7..7).source(id, offset);
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(4 * PAGE), small_options());
    let placed = builder.place(&[empty(1, 0), part.source(0, 0), empty(2, 0), empty(3, 4 * PAGE)]).unwrap();
    assert_eq!(placed.iter().map(|placed| placed.id).collect::<Vec<_>>(), [1, 0, 2, 3]);
    builder.place(&[empty(4, PAGE)]).unwrap();
    let store = builder.finish().unwrap();
    assert!(store.bytes_of(2).unwrap().as_slice().is_empty());
    assert_eq!(store.runs(0..4 * PAGE).len(), 1);
    assert_eq!(store.runs(PAGE..4 * PAGE).len(), 1);
}

#[test]
fn a_hole_of_the_line_is_no_padding() {
    let rig = Rig::eager();
    let options = StoreOptions { slab_only: true, ..small_options() };
    let region = Region::anonymous(2, 1).share();
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options);
    let part = Part::new(&region, 0..512);
    builder.place(&[part.source(0, 0), part.source(1, 512), part.source(2, 1536)]).unwrap();
    let runs: Vec<(u64, u64)> = builder
        .finish()
        .unwrap()
        .runs(0..LINE)
        .iter()
        .map(|run| (run.offset(), run.bytes().size().0))
        .collect();
    assert_eq!(runs, [(0, 1024), (1536, 512)]);
}
