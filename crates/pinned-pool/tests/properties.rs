//! Random models from random memory, with random refusals: every byte reaches the device, nothing leaks.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::{Held, PAGE, Part, Region, Rig};
use gpu_driver::{Bytes, CopyOrder, Verb};
use pinned_pool::{HostLevel, HostStore, StoreOptions};
use proptest::prelude::*;
use rustix::mm::MapFlags;

/// Where a tensor's bytes are: a memory of its own, or the next bytes of one that all such tensors share.
#[derive(Debug, Clone, Copy)]
enum Home {
    Anonymous,
    PrivateFile,
    Shared,
}

#[derive(Debug, Clone)]
struct Case {
    /// Bytes, home, and how many bytes lie unused before the tensor in its memory.
    tensors: Vec<(u64, Home, u64)>,
    group: usize,
    slab_only: bool,
    min_in_place: u64,
    chunk: u64,
    refusals: Vec<u64>,
    cuts: Vec<u64>,
    order: CopyOrder,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let home = prop_oneof![Just(Home::Anonymous), Just(Home::PrivateFile), Just(Home::Shared)];
    let size = prop_oneof![1 => Just(0u64), 3 => 1u64..600, 6 => 600u64..40_000];
    let tensor = (size, home, 0u64..9000);
    let order = prop_oneof![Just(CopyOrder::Eager), Just(CopyOrder::Lazy), Just(CopyOrder::Random)];
    let options = (prop::bool::weighted(0.2), 1u64..6, 1u64..20);
    (
        proptest::collection::vec(tensor, 1..14),
        1usize..5,
        options,
        proptest::collection::vec(0u64..8, 0..3),
        proptest::collection::vec(any::<u64>(), 0..4),
        order,
        any::<u64>(),
    )
        .prop_map(|(tensors, group, (slab_only, min_in_place, chunk), refusals, cuts, order, seed)| {
            Case { tensors, group, slab_only, min_in_place, chunk, refusals, cuts, order, seed }
        })
}

fn parts(case: &Case, held: &Arc<Held>) -> Vec<Part> {
    let together: u64 = case.tensors.iter().map(|(size, _, skip)| size + skip).sum();
    let shared = Region::anonymous(together.div_ceil(PAGE).max(1), 999).counted(held).share();
    let mut at = 0;
    let part = |(index, &(size, home, skip)): (usize, &(u64, Home, u64))| {
        let pages = (size + skip).div_ceil(PAGE).max(1);
        let own = |region: Region| Part::new(&region.counted(held).share(), skip..skip + size);
        match home {
            Home::Anonymous => own(Region::anonymous(pages, index as u64)),
            Home::PrivateFile => own(Region::file(pages, index as u64, MapFlags::PRIVATE)),
            Home::Shared => {
                let start = at + skip;
                at = start + size;
                Part::new(&shared, start..at)
            }
        }
    };
    case.tensors.iter().enumerate().map(part).collect()
}

fn check(case: &Case) -> Result<(), TestCaseError> {
    let rig = Rig::new(case.order, case.seed);
    let held = Arc::new(Held::default());
    let sources = parts(case, &held);
    let mut line = 0u64;
    let mut expected = Vec::new();
    let offsets: Vec<u64> = case
        .tensors
        .iter()
        .zip(&sources)
        .map(|((size, ..), part)| {
            let offset = line.next_multiple_of(512);
            expected.resize(offset as usize, None);
            expected.extend(part.expected().into_iter().map(Some));
            line = offset + size;
            offset
        })
        .collect();
    for refused in &case.refusals {
        rig.faulty.fail(Verb::RegisterHost, *refused);
    }
    let options = StoreOptions {
        slab_only: case.slab_only,
        min_in_place: Bytes(case.min_in_place * PAGE),
        chunk: Bytes(case.chunk * PAGE),
        threads: Some(1),
        ..StoreOptions::default()
    };
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(line), options);
    let tensors: Vec<_> =
        sources.iter().zip(0u32..).map(|(part, id)| part.source(id, offsets[id as usize])).collect();
    // Groups in another order than the line's.
    for group in tensors.chunks(case.group).rev() {
        builder.place(group).unwrap();
    }
    drop((tensors, sources));
    let store = builder.finish().unwrap();

    let report = store.report().clone();
    prop_assert_eq!(
        report.in_place + report.slab + report.pageable,
        case.tensors.iter().map(|(size, ..)| Bytes(*size)).sum()
    );
    prop_assert_eq!(rig.host.counters().registrations_alive, report.registrations as u64);
    prop_assert_eq!(
        report.pageable > Bytes::ZERO,
        report.step_downs.iter().any(|step| step.to == HostLevel::Pageable)
    );
    prop_assert!(!case.slab_only || report.in_place == Bytes::ZERO);
    if report.in_place == Bytes::ZERO {
        prop_assert_eq!(held.bytes(), 0, "every source was copied and let go");
    }

    // Whole tensors, as an application copies them.
    if case.refusals.is_empty() {
        for (id, (size, ..)) in (0u32..).zip(&case.tensors).filter(|(_, (size, ..))| *size > 0) {
            let copied = common::copied_whole(&rig, store.bytes_of(id).unwrap());
            let at = offsets[id as usize] as usize;
            let expected: Vec<u8> = expected[at..at + *size as usize].iter().flatten().copied().collect();
            prop_assert_eq!(copied.as_ref(), Ok(&expected), "tensor {}", id);
        }
    }

    // The line in stretches, as units cut it; the emulator refuses a source that is registered in part.
    let mut cuts: Vec<u64> = case.cuts.iter().map(|cut| cut % (line + 1)).collect();
    cuts.extend([0, line]);
    cuts.sort_unstable();
    let runs: Vec<_> = cuts.windows(2).flat_map(|cut| store.runs(cut[0]..cut[1])).collect();
    prop_assert!(runs.windows(2).all(|pair| pair[0].offset() + pair[0].bytes().size().0 <= pair[1].offset()));
    let device = common::upload(&rig, 0..line, &runs);
    for (at, (seen, expected)) in device.iter().zip(&expected).enumerate() {
        prop_assert!(expected.is_none_or(|byte| byte == *seen), "byte {} of {}", at, line);
    }
    drop(runs);
    drop(store);
    prop_assert_eq!(held.bytes(), 0);
    prop_assert!(rig.host.counters().nothing_alive(), "{:?}", rig.host.counters());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn every_byte_reaches_the_device_and_nothing_leaks(case in case()) {
        check(&case)?;
    }
}
