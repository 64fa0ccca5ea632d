//! Random models from memory and files under random policies, limits and refusals: every byte is where it should be, no
//! level is used that is not allowed, no limit is passed, nothing is left.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::io::Write;
use std::sync::Arc;

use common::{Held, PAGE, Part, Region, Rig, pattern, upload};
use gpu_driver::{Bytes, CopyOrder, Verb};
use pinned_pool::{
    FileBytes, HostLevel, HostRun, HostStore, Levels, LineRun, SourceFile, SourceTensor, StoreOptions,
    registered_bytes,
};
use proptest::prelude::*;

/// Pages of each of two files.
const FILE: u64 = 40;

#[derive(Debug, Clone)]
struct Tensor {
    size: u64,
    /// A file and where in it, or memory of its own.
    file: Option<(usize, u64)>,
    lock: bool,
}

#[derive(Debug, Clone)]
struct Case {
    tensors: Vec<Tensor>,
    group: usize,
    levels: Levels,
    limit: Option<u64>,
    /// Pages: of runs in place and mapped, of a piece, of a chunk.
    sizes: (u64, u64, u64),
    refusals: Vec<u64>,
    longest: Option<u64>,
    cuts: Vec<u64>,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let size = prop_oneof![1 => Just(0u64), 3 => 1u64..600, 6 => 600u64..40_000];
    let tensor = (size, prop::option::weighted(0.6, (0usize..2, 0..FILE * PAGE)), prop::bool::weighted(0.85));
    let tensor = tensor.prop_map(|(size, file, lock)| {
        let fits = |(file, at): (usize, u64)| (file, at.min(FILE * PAGE - size));
        Tensor { size, file: file.map(fits), lock }
    });
    let levels = (prop::bool::weighted(0.8), prop::bool::weighted(0.8), prop::bool::weighted(0.8));
    let levels = levels.prop_map(|(mapped, in_place, slab)| Levels { mapped, in_place, slab });
    let refused = (proptest::collection::vec(0u64..10, 0..3), prop::option::weighted(0.3, 0u64..12));
    let cuts = proptest::collection::vec(any::<u64>(), 0..4);
    let policy = (levels, prop::option::weighted(0.5, 0u64..60), (1u64..5, 1u64..20, 1u64..10));
    (proptest::collection::vec(tensor, 1..14), 1usize..5, policy, refused, cuts, any::<u64>()).prop_map(
        |(tensors, group, (levels, limit, sizes), (refusals, longest), cuts, seed)| Case {
            tensors,
            group,
            levels,
            limit,
            sizes,
            refusals,
            longest,
            cuts,
            seed,
        },
    )
}

fn files() -> Vec<(tempfile::NamedTempFile, Arc<SourceFile>)> {
    let file = |seed| {
        let mut named = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let bytes: Vec<u8> = (0..FILE * PAGE).map(|at| pattern(seed, at)).collect();
        named.write_all(&bytes).unwrap();
        let opened = SourceFile::open(named.path()).unwrap();
        (named, opened)
    };
    vec![file(1000), file(1001)]
}

fn check(case: &Case, files: &[(tempfile::NamedTempFile, Arc<SourceFile>)]) -> Result<(), TestCaseError> {
    let (rig, held, before) =
        (Rig::new(CopyOrder::Random, case.seed), Arc::new(Held::default()), registered_bytes());
    let (mut line, mut sources, mut expected) = (0u64, Vec::new(), Vec::new());
    for (tensor, id) in case.tensors.iter().zip(0u32..) {
        let offset = line.next_multiple_of(512);
        line = offset + tensor.size;
        let (source, bytes) = if let Some((file, at)) = tensor.file {
            let bytes = FileBytes::new(&files[file].1, at, Bytes(tensor.size)).unwrap();
            let expected = (at..at + tensor.size).map(|at| pattern(1000 + file as u64, at)).collect();
            (SourceTensor::new(id, offset, bytes), expected)
        } else {
            let region = Region::anonymous(tensor.size.div_ceil(PAGE).max(1), u64::from(id));
            let part = Part::new(&region.counted(&held).share(), 0..tensor.size);
            (part.source(id, offset), part.expected())
        };
        sources.push(if tensor.lock { source } else { source.unlocked() });
        expected.push((offset, bytes));
    }
    for refused in &case.refusals {
        rig.faulty.fail(Verb::RegisterHost, *refused);
    }
    if let Some(longest) = case.longest {
        rig.faulty.refuse_registrations_above(Bytes(longest * PAGE));
    }
    let limit = case.limit.map(|pages| before + Bytes(pages * PAGE));
    let (shortest, piece, chunk) = case.sizes;
    let options = StoreOptions {
        levels: case.levels,
        min_in_place: Bytes(shortest * PAGE),
        min_mapped: Bytes(shortest * PAGE),
        piece: Bytes(piece * PAGE),
        chunk: Bytes(chunk * PAGE),
        register_limit: limit,
        threads: Some(1),
        ..StoreOptions::default()
    };
    let mut builder = HostStore::builder(Arc::clone(&rig.driver), Bytes(line), options);
    for group in sources.chunks(case.group).rev() {
        builder.place(group).unwrap();
        prop_assert!(limit.is_none_or(|limit| registered_bytes() <= limit));
    }
    drop(sources);
    let store = builder.finish().unwrap();

    let report = store.report();
    prop_assert!(limit.is_none_or(|limit| registered_bytes() <= limit));
    prop_assert_eq!(registered_bytes(), before + report.registered);
    prop_assert!(case.levels.mapped || report.mapped == Bytes::ZERO);
    prop_assert!(case.levels.in_place || report.in_place == Bytes::ZERO);
    prop_assert!(case.levels.slab || report.slab == Bytes::ZERO);
    for (tensor, id) in case.tensors.iter().zip(0u32..).filter(|(tensor, _)| tensor.size > 0) {
        let placed = store.placed(id).unwrap();
        if !tensor.lock && tensor.file.is_some() {
            prop_assert_eq!(placed.level, HostLevel::File);
        }
        prop_assert!(tensor.lock || !placed.is_copied());
        let mut read = vec![0; tensor.size as usize];
        store.source_of(id).unwrap().read_at(0, &mut read).unwrap();
        prop_assert_eq!(&read, &expected[id as usize].1, "tensor {}", id);
    }

    // The line in stretches, as units cut it: locked bytes by the copy engine, the others as a staging ring reads them.
    let mut cuts: Vec<u64> = case.cuts.iter().map(|cut| cut % (line + 1)).collect();
    cuts.extend([0, line]);
    cuts.sort_unstable();
    let runs: Vec<LineRun> = cuts.windows(2).flat_map(|cut| store.line_runs(cut[0]..cut[1])).collect();
    prop_assert!(runs.windows(2).all(|pair| pair[0].offset() + pair[0].size().0 <= pair[1].offset()));
    let locked: Vec<HostRun> = runs
        .iter()
        .filter_map(|run| match run {
            LineRun::Locked(run) => Some(run.clone()),
            LineRun::Staged { .. } => None,
        })
        .collect();
    let mut seen = upload(&rig, 0..line.max(1), &locked);
    for run in &runs {
        if let LineRun::Staged { offset, bytes } = run {
            bytes.read_at(0, &mut seen[*offset as usize..][..bytes.size().as_usize()]).unwrap();
        }
    }
    for (offset, bytes) in &expected {
        prop_assert_eq!(&seen[*offset as usize..][..bytes.len()], &bytes[..], "the tensor at {}", offset);
    }
    store.check_unchanged().unwrap();
    drop((runs, locked, store));
    prop_assert_eq!(held.bytes(), 0);
    prop_assert_eq!(registered_bytes(), before);
    prop_assert!(rig.host.counters().nothing_alive(), "{:?}", rig.host.counters());
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn policies_limits_and_refusals_leave_every_byte_right(cases in proptest::collection::vec(case(), 1..4)) {
        let files = files();
        for case in &cases {
            check(case, &files)?;
        }
    }
}
