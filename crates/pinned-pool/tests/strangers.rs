//! Pages at the ends of tensors in place: none with a byte of others is registered, so that their copies are not refused.
#![allow(clippy::unwrap_used, unsafe_code)]

mod common;

use std::ops::Range;
use std::sync::Arc;

use common::{PAGE, Part, Region, Rig, small_options, upload};
use gpu_driver::{Bytes, Driver, Registration};
use pinned_pool::{HostLevel, HostRun, HostStore, StoreOptions};
use proptest::prelude::*;

const LINE: u64 = 64 * PAGE;

/// Whether a page is registered: the driver takes no page twice.
fn is_registered(rig: &Rig, address: *mut u8) -> bool {
    // SAFETY: a page of a region that lives; nothing is copied before it is unregistered.
    let registered = unsafe { rig.host.register_host(address, Bytes(PAGE), Registration::ReadWrite) };
    if registered.is_ok() {
        // SAFETY: registered just now; no copy reads it.
        unsafe { rig.host.unregister_host(address) }.unwrap();
    }
    registered.is_err()
}

/// Copies a stranger's bytes to the device and back, as an application does that knows nothing of the store.
fn copy_there_and_back(rig: &Rig, stranger: &Part) {
    let size = Bytes(stranger.range.end - stranger.range.start);
    let (space, stream) = (rig.space(size.0), rig.stream());
    stream.copy(&space, &[HostRun::new(0, stranger.bytes())]).unwrap();
    let target = stranger.region.address().wrapping_add(stranger.range.start as usize);
    // SAFETY: the stranger's own bytes, which nobody reads meanwhile, in a region that lives; the source is mapped.
    unsafe { rig.driver.copy_to_host(target, space.address(), size, stream.handle()) }.unwrap();
    stream.drain().unwrap();
    assert_eq!(stranger.bytes().as_slice(), stranger.expected());
}

#[test]
fn a_stranger_on_the_first_or_last_page_of_a_tensor_is_copied_while_the_store_lives() {
    let rig = Rig::eager();
    let region = Region::anonymous(8, 1).share();
    let (start, end) = (PAGE + 100, 7 * PAGE - 200);
    let tensor = Part::new(&region, start..end);
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    let placed = builder.place(&[tensor.source(0, 512)]).unwrap();
    let store = builder.finish();
    assert_eq!(placed[0].level, HostLevel::InPlace);
    for stranger in [0..start, end..8 * PAGE, PAGE..start, end..7 * PAGE] {
        copy_there_and_back(&rig, &Part::new(&region, stranger));
    }
    // The tensor is where it was, and is copied from there and from the slab.
    assert_eq!(store.bytes_of(0).unwrap().address(), tensor.bytes().address());
    assert_eq!(store.bytes_of(0).unwrap().as_slice(), tensor.expected());
    let report = store.report();
    let copied = Bytes(2 * PAGE - 300);
    assert_eq!((report.in_place, report.slab, report.pageable), (Bytes(4 * PAGE), copied, Bytes::ZERO));
    let runs = store.runs(0..LINE);
    let pieces: Vec<_> = runs.iter().map(|run| (run.offset(), run.bytes().size().0)).collect();
    let head = PAGE - 100;
    assert_eq!(pieces, [(512, head), (512 + head, 4 * PAGE), (512 + head + 4 * PAGE, PAGE - 200)]);
    let device = upload(&rig, 0..LINE, &runs);
    assert_eq!(device[512..512 + (end - start) as usize], tensor.expected());
}

#[test]
fn large_allocations_with_a_header_cost_one_run_more_than_two_a_tensor() {
    let rig = Rig::eager();
    let (pages, tensors) = (16, 4u32);
    let size = pages * PAGE;
    // As an allocator lays them: 64 bytes into pages of their own.
    let parts: Vec<Part> = (0..tensors)
        .map(|seed| {
            let region = Region::anonymous(pages + 1, u64::from(seed));
            Part::new(&region.share(), 64..64 + size)
        })
        .collect();
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    for (part, id) in parts.iter().zip(0u32..) {
        builder.place(&[part.source(id, u64::from(id) * size)]).unwrap();
    }
    let store = builder.finish();
    let count = |line: Range<u64>| store.runs(line).len();
    assert_eq!(count(0..LINE), 9, "each tensor's own, and what is around them");
    assert_eq!(count(size..3 * size), 5, "two of them");
    assert_eq!(count(size + PAGE..2 * size - PAGE), 1, "inside one");
    let report = store.report();
    assert_eq!((report.in_place, report.slab), (Bytes(4 * (size - PAGE)), Bytes(4 * PAGE)));
    // Of the slab: a page at each end, and the two that meet where tensors do.
    assert_eq!((report.registered, report.registrations), (Bytes((60 + 8) * PAGE), 4 + 5));
    let device = upload(&rig, 0..4 * size, &store.runs(0..4 * size));
    assert!(device == parts.iter().flat_map(Part::expected).collect::<Vec<u8>>());
}

#[test]
fn tensors_that_touch_are_registered_at_once() {
    let rig = Rig::eager();
    let region = Region::anonymous(4, 1).share();
    let parts = [0..PAGE + 100, PAGE + 100..PAGE + 600, PAGE + 600..4 * PAGE];
    let parts = parts.map(|range| Part::new(&region, range));
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    let sources: Vec<_> =
        parts.iter().zip(0u32..).map(|(part, id)| part.source(id, u64::from(id) * 8 * PAGE)).collect();
    builder.place(&sources).unwrap();
    let store = builder.finish();
    assert!((0..3).all(|id| store.placed(id).unwrap().level == HostLevel::InPlace));
    let report = store.report();
    assert_eq!((report.registrations, report.registered), (1, Bytes(4 * PAGE)));
    assert_eq!(rig.host.counters().registrations_alive, 1);
    assert_eq!(store.runs(0..LINE).len(), 3);
}

#[test]
fn a_page_that_two_groups_share_is_copied() {
    let rig = Rig::eager();
    let region = Region::anonymous(8, 1).share();
    // The groups meet in the middle of page 3.
    let (one, two) = (Part::new(&region, 0..3 * PAGE + 1000), Part::new(&region, 3 * PAGE + 1000..8 * PAGE));
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    builder.place(&[one.source(0, 0)]).unwrap();
    builder.place(&[two.source(1, 16 * PAGE)]).unwrap();
    let store = builder.finish();
    assert!((0..2).all(|id| store.placed(id).unwrap().level == HostLevel::InPlace));
    assert_eq!((store.report().in_place, store.report().slab), (Bytes(7 * PAGE), Bytes(PAGE)));
    let pieces: Vec<u64> = store.runs(0..LINE).iter().map(|run| run.bytes().size().0).collect();
    assert_eq!(pieces, [3 * PAGE, 1000, PAGE - 1000, 4 * PAGE]);
    let device = upload(&rig, 0..LINE, &store.runs(0..LINE));
    assert_eq!(device[16 * PAGE as usize..][..two.expected().len()], two.expected());
}

#[derive(Debug, Clone)]
struct Case {
    /// What lies in one mapping, in order: bytes, and whether they are a tensor's.
    packed: Vec<(u64, bool)>,
    group: usize,
    min_in_place: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let size = prop_oneof![
        2 => 1u64..100,
        2 => (1u64..6).prop_map(|pages| pages * PAGE),
        1 => Just(PAGE - 64),
        4 => 1u64..5 * PAGE,
    ];
    let packed = proptest::collection::vec((size, prop::bool::weighted(0.7)), 1..24);
    (packed, 1usize..6, 1u64..4).prop_map(|(packed, group, min_in_place)| Case {
        packed,
        group,
        min_in_place,
    })
}

/// Which pages may be registered, byte by byte.
fn pages_of(group: &[Part], pages: u64, shortest: u64) -> Vec<bool> {
    let mut ours = vec![false; (pages * PAGE) as usize];
    for part in group {
        ours[part.range.start as usize..part.range.end as usize].fill(true);
    }
    let mut whole: Vec<bool> = ours.chunks(PAGE as usize).map(|page| page.iter().all(|&byte| byte)).collect();
    for run in whole.chunk_by_mut(|one, other| one == other) {
        if (run.len() as u64) < shortest {
            run.fill(false);
        }
    }
    whole
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let rig = Rig::eager();
    let total: u64 = case.packed.iter().map(|(size, _)| size).sum();
    let pages = total.div_ceil(PAGE);
    let region = Region::anonymous(pages, 7).share();
    let (mut at, mut line) = (0, 0u64);
    let (mut tensors, mut strangers, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
    for &(size, ours) in &case.packed {
        let part = Part::new(&region, at..at + size);
        at += size;
        if ours {
            offsets.push(line);
            line = (line + size).next_multiple_of(512);
            tensors.push(part);
        } else {
            strangers.push(part);
        }
    }
    let options = StoreOptions { min_in_place: Bytes(case.min_in_place * PAGE), ..small_options() };
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(line), options);
    let sources: Vec<_> =
        tensors.iter().zip(0u32..).map(|(part, id)| part.source(id, offsets[id as usize])).collect();
    for group in sources.chunks(case.group) {
        builder.place(group).unwrap();
    }
    let store = builder.finish();

    let mut registered = 0;
    let expected: Vec<Vec<bool>> =
        tensors.chunks(case.group).map(|group| pages_of(group, pages, case.min_in_place)).collect();
    for page in 0..pages {
        let expected = expected.iter().any(|group| group[page as usize]);
        let address = region.address().wrapping_add((page * PAGE) as usize);
        prop_assert_eq!(is_registered(&rig, address), expected, "page {}", page);
        registered += u64::from(expected) * PAGE;
    }
    for stranger in &strangers {
        copy_there_and_back(&rig, stranger);
    }

    let report = store.report();
    let ours: u64 = tensors.iter().map(|part| part.range.end - part.range.start).sum();
    prop_assert_eq!((report.in_place, report.slab), (Bytes(registered), Bytes(ours - registered)));
    let runs = store.runs(0..line);
    let device = upload(&rig, 0..line, &runs);
    for ((part, &offset), id) in tensors.iter().zip(&offsets).zip(0u32..) {
        let expected = part.expected();
        prop_assert!(device[offset as usize..][..expected.len()] == expected, "tensor {}", id);
        let placed = store.placed(id).unwrap();
        prop_assert!(placed.bytes.as_slice() == expected, "tensor {} on the host", id);
        prop_assert_eq!(placed.is_copied(), placed.bytes.address() != part.bytes().address());
    }
    // Tensors in place, and one stretch of the slab before, between and after them, cut where its registrations meet.
    let in_place = (0..tensors.len() as u32).filter(|&id| !store.placed(id).unwrap().is_copied()).count();
    prop_assert!(runs.len() <= 2 * in_place + 1 + report.registrations, "{} runs", runs.len());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]

    #[test]
    fn only_pages_full_of_tensors_are_registered(case in case()) {
        check(&case)?;
    }
}
