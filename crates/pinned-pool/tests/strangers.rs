//! Copies that an application makes while a store lives: of its own bytes beside tensors, and of whole tensors.
#![allow(clippy::unwrap_used, unsafe_code)]

mod common;

use std::sync::Arc;

use common::{PAGE, Part, Region, Rig, copied_whole, small_options, upload};
use gpu_driver::{Bytes, Driver, Registration};
use pinned_pool::{HostLevel, HostRun, HostStore, StoreOptions};
use proptest::prelude::*;

const LINE: u64 = 96 * PAGE;

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

/// Copies a stranger's bytes to the device and back into them.
fn copy_there_and_back(rig: &Rig, stranger: &Part) {
    assert_eq!(copied_whole(rig, &stranger.bytes()).unwrap(), stranger.expected());
    let size = stranger.bytes().size();
    let (space, stream) = (rig.space(size.0), rig.stream());
    stream.copy(&space, &[HostRun::new(0, stranger.bytes())]).unwrap();
    let target = stranger.region.address().wrapping_add(stranger.range.start as usize);
    // SAFETY: the stranger's own bytes, which nobody reads meanwhile, in a region that lives; the source is mapped.
    unsafe { rig.driver.copy_to_host(target, space.address(), size, stream.handle()) }.unwrap();
    stream.drain().unwrap();
    assert_eq!(stranger.bytes().as_slice(), stranger.expected());
}

#[test]
fn a_stranger_on_the_pages_of_tensors_is_copied_while_the_store_lives() {
    let rig = Rig::eager();
    let region = Region::anonymous(12, 1).share();
    let (first, second) = (PAGE + 100..6 * PAGE - 200, 6 * PAGE - 100..11 * PAGE + 100);
    let parts = [first.clone(), second.clone()].map(|range| Part::new(&region, range));
    // As 20 MiB are to 32: allocations that may share their pages, and together are a run that is long enough.
    let options = StoreOptions { min_in_place: Bytes(8 * PAGE), ..small_options() };
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), options);
    builder.place(&[parts[0].source(0, 512), parts[1].source(1, 40 * PAGE)]).unwrap();
    let store = builder.finish().unwrap();
    let strangers = [0..first.start, first.end..second.start, second.end..12 * PAGE];
    for stranger in strangers.into_iter().chain(std::iter::once(PAGE..first.start)) {
        copy_there_and_back(&rig, &Part::new(&region, stranger));
    }
    for (part, id) in parts.iter().zip(0..) {
        assert_eq!(store.placed(id).unwrap().level, HostLevel::Slab);
        assert_eq!(copied_whole(&rig, store.bytes_of(id).unwrap()).unwrap(), part.expected());
    }
}

#[test]
fn large_allocations_with_a_header_are_one_run_each() {
    let rig = Rig::eager();
    let (pages, tensors) = (16, 4u32);
    let size = pages * PAGE;
    // As an allocator lays them: 64 bytes into pages of their own.
    let regions: Vec<_> =
        (0..tensors).map(|seed| Region::anonymous(pages + 1, u64::from(seed)).share()).collect();
    let parts: Vec<Part> = regions.iter().map(|region| Part::new(region, 64..64 + size)).collect();
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(LINE), small_options());
    for (part, id) in parts.iter().zip(0u32..) {
        builder.place(&[part.source(id, u64::from(id) * size)]).unwrap();
    }
    let store = builder.finish().unwrap();
    assert_eq!(store.runs(0..LINE).len(), 4);
    assert_eq!(store.runs(size + 5..3 * size - 5).len(), 2);
    let report = store.report();
    assert_eq!((report.in_place, report.slab), (Bytes(4 * size), Bytes::ZERO));
    assert_eq!((report.registered, report.registrations), (Bytes(4 * 17 * PAGE), 4));
    for (part, id) in parts.iter().zip(0u32..) {
        let bytes = store.bytes_of(id).unwrap();
        assert_eq!(bytes.address(), part.bytes().address());
        assert_eq!(copied_whole(&rig, bytes).unwrap(), part.expected());
    }
    let device = upload(&rig, 0..4 * size, &store.runs(0..4 * size));
    assert!(device == parts.iter().flat_map(Part::expected).collect::<Vec<u8>>());
}

#[derive(Debug, Clone)]
struct Case {
    /// What lies in one mapping, in order: bytes, and whether they are a tensor's.
    packed: Vec<(u64, bool)>,
    /// Bytes of tensors in allocations of their own, behind a header.
    alone: Vec<u64>,
    group: usize,
    /// In pages.
    min_in_place: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let size = prop_oneof![
        2 => 1u64..100,
        4 => (1u64..5).prop_map(|pages| pages * PAGE),
        1 => Just(PAGE - 64),
        4 => 1u64..4 * PAGE,
    ];
    let packed = proptest::collection::vec((size, prop::bool::weighted(0.85)), 1..24);
    let alone = proptest::collection::vec(1u64..8 * PAGE, 0..4);
    (packed, alone, 1usize..12, 5u64..8).prop_map(|(packed, alone, group, min_in_place)| Case {
        packed,
        alone,
        group,
        min_in_place,
    })
}

/// Which pages of the shared mapping hold nothing but tensors of `group`. None of these is as long as those that count as
/// having their pages to themselves, as none would be that an allocator lays beside others.
fn pages_full_of(group: &[Part], pages: u64) -> Vec<bool> {
    let mut ours = vec![false; (pages * PAGE) as usize];
    for part in group {
        ours[part.range.start as usize..part.range.end as usize].fill(true);
    }
    ours.chunks(PAGE as usize).map(|page| page.iter().all(|&byte| byte)).collect()
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let rig = Rig::eager();
    let long = case.min_in_place * PAGE;
    let pages = case.packed.iter().map(|(size, _)| size).sum::<u64>().div_ceil(PAGE);
    let region = Region::anonymous(pages, 7).share();
    let (mut tensors, mut strangers, mut at) = (Vec::new(), Vec::new(), 0);
    for &(size, ours) in &case.packed {
        let part = Part::new(&region, at..at + size);
        at += size;
        if ours { tensors.push(part) } else { strangers.push(part) }
    }
    let packed = tensors.len();
    for (&size, seed) in case.alone.iter().zip(100..) {
        let region = Region::anonymous((size + 64).div_ceil(PAGE), seed).share();
        tensors.push(Part::new(&region, 64..64 + size));
    }
    let mut line = 0;
    let offset = |part: &Part| {
        let offset = line;
        line = (line + part.range.end - part.range.start).next_multiple_of(512);
        offset
    };
    let offsets: Vec<u64> = tensors.iter().map(offset).collect();
    let options = StoreOptions { min_in_place: Bytes(long), ..small_options() };
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(line.max(1)), options);
    let sources: Vec<_> =
        tensors.iter().zip(0u32..).map(|(part, id)| part.source(id, offsets[id as usize])).collect();
    for group in sources[..packed].chunks(case.group).chain(sources[packed..].chunks(1)) {
        builder.place(group).unwrap();
    }
    let store = builder.finish().unwrap();

    // No page with a stranger's byte is registered, nor one that a tensor in the slab left behind.
    let mut full = vec![false; pages as usize];
    for group in tensors[..packed].chunks(case.group) {
        for (known, more) in full.iter_mut().zip(pages_full_of(group, pages)) {
            *known |= more;
        }
    }
    for (page, full) in (0u64..).zip(full) {
        let registered = is_registered(&rig, region.address().wrapping_add((page * PAGE) as usize));
        prop_assert!(full || !registered, "page {}", page);
    }
    for stranger in &strangers {
        copy_there_and_back(&rig, stranger);
    }
    // Every tensor can be copied whole, and those with pages to themselves are where they were.
    let mut in_place = 0;
    for (part, id) in tensors.iter().zip(0u32..) {
        let placed = store.placed(id).unwrap();
        prop_assert_eq!(
            copied_whole(&rig, placed.bytes.memory().unwrap()),
            Ok(part.expected()),
            "tensor {}",
            id
        );
        prop_assert_eq!(
            placed.is_copied(),
            placed.bytes.memory().unwrap().address() != part.bytes().address()
        );
        prop_assert!(placed.level != HostLevel::Pageable);
        if id as usize >= packed {
            let is_long = part.range.end - part.range.start >= long;
            prop_assert_eq!(placed.level == HostLevel::InPlace, is_long, "tensor {}", id);
        }
        in_place += usize::from(placed.level == HostLevel::InPlace);
    }
    // Tensors in place, and one stretch of the slab before, between and after them.
    let runs = store.runs(0..line);
    prop_assert!(runs.len() <= 2 * in_place + 1, "{} runs", runs.len());
    let device = upload(&rig, 0..line, &runs);
    for (part, &offset) in tensors.iter().zip(&offsets) {
        let expected = part.expected();
        prop_assert!(device[offset as usize..][..expected.len()] == expected, "the tensor at {}", offset);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(150) })]

    #[test]
    fn strangers_and_whole_tensors_can_be_copied_while_a_store_lives(case in case()) {
        check(&case)?;
    }
}
