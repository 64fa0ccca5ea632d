//! Faults put between reads and what is believed of them: short reads, interruptions, refusals, failures.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failing test may say so by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use rustix::io::Errno;

use super::gate::{Gate, Outcome, Route};
use super::read::read_past;
use super::{IoMode, OpenFile, ReadJob, ReadOptions, ReadReport};
use crate::error::{CheckpointError, Result};

const MODES: [IoMode; 5] = [IoMode::Auto, IoMode::Mapped, IoMode::Buffered, IoMode::Direct, IoMode::Uring];

/// A gate made of a function of the route, of how many reads there were, and of the outcome.
struct Fault<F>(F, AtomicU64);

impl<F: Fn(Route, u64, Outcome) -> Outcome + Sync> Gate for Fault<F> {
    fn pass(&self, route: Route, outcome: Outcome) -> Outcome {
        (self.0)(route, self.1.fetch_add(1, Ordering::Relaxed), outcome)
    }
}

fn fault<F: Fn(Route, u64, Outcome) -> Outcome + Sync>(function: F) -> Fault<F> {
    Fault(function, AtomicU64::new(0))
}

fn contents(size: usize) -> Vec<u8> {
    (0..size).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn file(folder: &Path, size: usize) -> (Arc<OpenFile>, Vec<u8>) {
    let bytes = contents(size);
    std::fs::write(folder.join("file"), &bytes).unwrap();
    (Arc::new(OpenFile::open(folder.join("file")).unwrap()), bytes)
}

/// Reads ranges of a file through a gate, and checks what came.
fn check(
    file: &Arc<OpenFile>,
    bytes: &[u8],
    ranges: &[(usize, usize)],
    mode: IoMode,
    gate: &dyn Gate,
) -> Result<ReadReport> {
    let mut memory: Vec<_> = ranges.iter().map(|(_, size)| vec![0; size + 4096]).collect();
    // Whole pages go straight to memory at the start of a page.
    let targets = memory.iter_mut().zip(ranges).map(|(memory, (_, size))| {
        let start = memory.as_ptr().addr().wrapping_neg() % 4096;
        &mut memory[start..start + size]
    });
    let mut targets: Vec<_> = targets.collect();
    let names: Vec<_> = (0..ranges.len()).map(|i| format!("t{i}")).collect();
    let jobs = ranges.iter().zip(&mut targets).zip(&names);
    let mut jobs: Vec<_> =
        jobs.map(|(((at, _), target), name)| ReadJob { name, file, offset: *at as u64, target }).collect();
    let report = read_past(&mut jobs, &ReadOptions { mode, ..ReadOptions::default() }, gate)?;
    for ((at, size), target) in ranges.iter().zip(&targets) {
        assert!(**target == bytes[*at..at + size], "{mode:?}: {size} bytes at {at} differ");
    }
    Ok(report)
}

const RANGES: [(usize, usize); 5] =
    [(100, 3), (103, 20_000), (25_000, 4096), (40_961, 9_000), (65_536, 4464)];
/// Whole pages, far enough from each other to be read apart.
const PAGES: [(usize, usize); 3] = [(4096, 8192), (20_480, 4096), (36_864, 16_384)];

#[test]
fn reads_of_one_byte_and_interruptions_lose_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (file, bytes) = file(folder.path(), 70_000);
    for mode in MODES {
        for ranges in [&RANGES[..], &PAGES] {
            check(&file, &bytes, ranges, mode, &fault(|_, _, o: Outcome| o.map(|n| n.min(1)))).unwrap();
            let every_second = fault(|_, count, o| if count % 2 == 0 { Err(Errno::INTR) } else { o });
            check(&file, &bytes, ranges, mode, &every_second).unwrap();
            let nothing_direct = fault(|r, _, o| if r == Route::Buffered { o } else { Ok(0) });
            check(&file, &bytes, ranges, mode, &nothing_direct).unwrap();
        }
    }
}

#[test]
fn direct_reads_that_are_refused_or_fail_are_done_without() {
    let folder = tempfile::tempdir().unwrap();
    let (file, bytes) = file(folder.path(), 70_000);
    for mode in [IoMode::Direct, IoMode::Uring] {
        let offered = check(&file, &bytes, &RANGES, mode, &super::gate::Open).unwrap().files[0].choice.mode;
        for error in [Errno::INVAL, Errno::OPNOTSUPP, Errno::IO, Errno::AGAIN, Errno::CANCELED, Errno::NOMEM]
        {
            let refusing = fault(move |r, _, o| if r == Route::Buffered { o } else { Err(error) });
            let report = check(&file, &bytes, &RANGES, mode, &refusing).unwrap();
            let choice = &report.files[0].choice;
            let refused = matches!(error, Errno::INVAL | Errno::OPNOTSUPP);
            if refused && offered != IoMode::Buffered {
                assert_eq!(choice.mode, IoMode::Buffered);
                assert!(choice.why.contains("refused"), "{}", choice.why);
            }
        }
    }
}

#[test]
fn a_device_that_fails_is_an_error_that_names_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let (file, bytes) = file(folder.path(), 70_000);
    for mode in MODES {
        let failing = fault(|_, _, _| Err(Errno::IO));
        let error = check(&file, &bytes, &RANGES[3..4], mode, &failing).unwrap_err();
        let CheckpointError::Read { what, offset, source, .. } = &error else { panic!("{error}") };
        assert_eq!((what.as_str(), *offset), ("tensor \"t0\"", 40_961));
        assert_eq!(source.raw_os_error(), Some(Errno::IO.raw_os_error()));
        // The file is fine, and the next call is right.
        check(&file, &bytes, &RANGES, mode, &super::gate::Open).unwrap();
    }
}

#[test]
fn an_end_before_the_end_is_an_error_that_names_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let (file, bytes) = file(folder.path(), 70_000);
    for mode in MODES {
        let error = check(&file, &bytes, &RANGES[3..4], mode, &fault(|_, _, _| Ok(0))).unwrap_err();
        assert!(matches!(error, CheckpointError::Truncated { .. }), "{error}");
        assert!(error.to_string().contains("tensor \"t0\", which is bytes 40961..49961"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_mixture_of_faults_loses_nothing(
        ranges in proptest::collection::vec(
            prop_oneof![
                (0_usize..200_000, 0_usize..40_000),
                (0_usize..48, 1_usize..9).prop_map(|(at, size)| (4096 * at, 4096 * size)),
            ],
            1..20,
        ),
        mode in proptest::sample::select(&MODES[..]),
        seed in any::<u64>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (file, bytes) = file(folder.path(), 240_000);
        let mixture = fault(move |route, count, outcome: Outcome| {
            let dice = (seed ^ count).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
            match dice % 8 {
                0 => Err(Errno::INTR),
                1 if route != Route::Buffered => Err([Errno::INVAL, Errno::IO][count as usize % 2]),
                2 => outcome.map(|n| n.min(1)),
                // Never nothing where there is something: that would be the end of the file.
                3 | 4 => outcome.map(|n| n.min(1 + dice as usize % (n + 1))),
                _ => outcome,
            }
        });
        check(&file, &bytes, &ranges, mode, &mixture).unwrap();
    }
}
