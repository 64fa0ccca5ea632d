//! Reading many tensors in one call: every way gives the same bytes, and what goes wrong has a name.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failing test may say so by panicking")]

use std::fs;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use checkpoint::io::{IoMode, OpenFile, ReadJob, ReadOptions, ReadReport, read};
use checkpoint::{Cancel, CheckpointError, Result};
use proptest::prelude::*;

const MODES: [IoMode; 5] = [IoMode::Auto, IoMode::Mapped, IoMode::Buffered, IoMode::Direct, IoMode::Uring];
const MIB: usize = 1 << 20;

fn contents(size: usize, seed: usize) -> Vec<u8> {
    (0..size).map(|i| ((i + seed).wrapping_mul(2_654_435_761) >> 13) as u8).collect()
}

fn file(folder: &Path, name: &str, size: usize) -> (Arc<OpenFile>, Vec<u8>) {
    let bytes = contents(size, name.len());
    fs::write(folder.join(name), &bytes).unwrap();
    (Arc::new(OpenFile::open(folder.join(name)).unwrap()), bytes)
}

/// Reads one range after `shift` bytes of a page-aligned target.
fn read_one(
    file: &Arc<OpenFile>,
    at: usize,
    size: usize,
    shift: usize,
    options: &ReadOptions<'_>,
) -> Result<(Vec<u8>, ReadReport)> {
    let mut memory = vec![0; size + 8192];
    let start = memory.as_ptr().addr().wrapping_neg() % 4096 + shift;
    let target = &mut memory[start..start + size];
    let report = read(&mut [ReadJob { name: "only", file, offset: at as u64, target }], options)?;
    Ok((memory[start..start + size].to_vec(), report))
}

fn with(mode: IoMode) -> ReadOptions<'static> {
    ReadOptions { mode, ..ReadOptions::default() }
}

#[test]
fn heads_tails_and_tensors_longer_than_any_buffer() {
    let folder = tempfile::tempdir().unwrap();
    let (file, bytes) = file(folder.path(), "large", 40 * MIB + 777);
    let size = bytes.len();
    for mode in MODES {
        for (at, length) in [(0, size), (8 + 321, 30 * MIB), (4096, 8 * MIB), (size - 5, 5), (4 * MIB - 1, 2)]
        {
            for shift in [0, 1, 512] {
                let (found, report) = read_one(&file, at, length, shift, &with(mode)).unwrap();
                assert!(found == bytes[at..at + length], "{mode:?}: {length} bytes at {at}");
                assert_eq!(report.bytes_asked, length as u64);
                let most = length as u64 + 2 * 4096;
                assert!((length as u64..=most).contains(&report.bytes_read), "{report:?}");
            }
        }
    }
}

#[test]
fn aligned_bytes_go_straight_to_aligned_targets() {
    let folder = tempfile::tempdir().unwrap();
    let (file, bytes) = file(folder.path(), "aligned", 16 * MIB);
    for mode in [IoMode::Direct, IoMode::Uring] {
        let (found, report) = read_one(&file, 4096, 12 * MIB, 0, &with(mode)).unwrap();
        assert!(found == bytes[4096..4096 + 12 * MIB]);
        assert_eq!(report.files[0].bytes_bounced, 0, "{report:?}");
        let (_, report) = read_one(&file, 4097, 12 * MIB, 1, &with(mode)).unwrap();
        // Where the kernel asks for less than a page, only the ends are.
        assert!(
            report.files[0].choice.mode == IoMode::Buffered || report.files[0].bytes_bounced > 0,
            "{report:?}"
        );
    }
}

#[test]
fn auto_says_what_it_chose_and_why() {
    let folder = tempfile::tempdir().unwrap();
    let (file, bytes) = file(folder.path(), "warm", 4 * MIB);
    fs::File::open(file.path()).unwrap().sync_all().unwrap();
    let (found, report) = read_one(&file, 0, bytes.len(), 0, &ReadOptions::default()).unwrap();
    assert!(found == bytes);
    assert_eq!(report.files[0].choice.mode, IoMode::Buffered, "{report:?}");
    assert!(!report.files[0].choice.why.is_empty());
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["files"][0]["choice"]["mode"], "buffered");
    for mode in [IoMode::Buffered, IoMode::Direct, IoMode::Uring] {
        let choice = &read_one(&file, 0, bytes.len(), 0, &with(mode)).unwrap().1.files[0].choice;
        assert!(choice.mode == mode || !choice.why.is_empty(), "{choice:?}");
    }
}

#[test]
fn what_is_partly_in_the_page_cache_is_read_both_ways() {
    let folder = tempfile::tempdir().unwrap();
    let (file, bytes) = file(folder.path(), "half", 32 * MIB);
    file.file().sync_all().unwrap();
    rustix::fs::fadvise(file.file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
    rustix::fs::fadvise(file.file(), 0, None, rustix::fs::Advice::Random).unwrap();
    file.read_exact_at(8 * MIB as u64, &mut vec![0; 16 * MIB]).unwrap();
    let resident = || file.resident_fraction(0..32 * MIB as u64);
    let before = resident();
    let (found, report) = read_one(&file, 5, 32 * MIB - 5, 0, &ReadOptions::default()).unwrap();
    assert!(found == bytes[5..]);
    // Where files never leave the page cache, or direct reads are not offered, there is nothing to see.
    if before.is_some_and(|part| part < 0.6) && report.files[0].choice.mode == IoMode::Direct {
        assert_eq!(resident(), before, "the page cache is left as it was found");
        assert!(report.files[0].choice.why.contains("50 %"), "{report:?}");
        assert!(
            report.files[0].bytes_bounced <= 17 * MIB as u64,
            "half of it came through the cache: {report:?}"
        );
    }
}

#[test]
fn files_in_memory_are_read_without_fuss() {
    let memory = rustix::fs::memfd_create("weights", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    let bytes = contents(2 * MIB, 3);
    fs::write(&path, &bytes).unwrap();
    let file = Arc::new(OpenFile::open(&path).unwrap());
    for mode in MODES {
        let (found, report) = read_one(&file, 11, MIB, 3, &with(mode)).unwrap();
        assert!(found == bytes[11..11 + MIB]);
        assert!(mode != IoMode::Auto || report.files[0].choice.why.contains("memory"), "{report:?}");
    }
}

#[test]
fn nothing_is_read_for_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (file, _) = file(folder.path(), "some", 1000);
    assert_eq!(read(&mut [], &ReadOptions::default()).unwrap().files, []);
    for mode in MODES {
        let (_, report) = read_one(&file, 1000, 0, 0, &with(mode)).unwrap();
        assert_eq!((report.bytes_asked, report.bytes_read), (0, 0));
    }
}

#[test]
fn bytes_that_the_file_does_not_have_are_refused_before_any_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (file, _) = file(folder.path(), "short", 1000);
    let mut target = [7; 600];
    let (first, second) = target.split_at_mut(300);
    let error = read(
        &mut [
            ReadJob { name: "a", file: &file, offset: 0, target: first },
            ReadJob { name: "b", file: &file, offset: 701, target: second },
        ],
        &ReadOptions::default(),
    );
    let error = error.unwrap_err();
    assert!(matches!(error, CheckpointError::OutsideFile { .. }), "{error}");
    assert!(error.to_string().contains("bytes 701..1001 of tensor \"b\" are outside"), "{error}");
    assert_eq!(target, [7; 600]);
    let huge = read_one(&file, usize::MAX, 2, 0, &ReadOptions::default()).unwrap_err();
    assert!(matches!(huge, CheckpointError::OutsideFile { .. }), "{huge}");
}

#[test]
fn a_file_that_is_cut_after_opening_is_an_error_that_names_the_tensor() {
    let folder = tempfile::tempdir().unwrap();
    for mode in MODES {
        let (file, _) = file(folder.path(), "cut", 6 * MIB);
        fs::File::options().write(true).open(file.path()).unwrap().set_len(5 * MIB as u64 + 100).unwrap();
        let error = read_one(&file, MIB, 5 * MIB, 0, &with(mode)).unwrap_err();
        let CheckpointError::Truncated { what, end, .. } = &error else { panic!("{error}") };
        assert_eq!((what.as_str(), *end), ("tensor \"only\"", 5 * MIB as u64 + 100));
        fs::remove_file(file.path()).unwrap();
    }
}

#[test]
fn a_file_that_is_written_to_after_opening_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let (file, _) = file(folder.path(), "changed", MIB);
    fs::write(file.path(), vec![0; MIB + 1]).unwrap();
    let error = read_one(&file, 0, MIB, 0, &ReadOptions::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::Changed { .. }), "{error}");
    assert!(error.to_string().ends_with("1048577 now; load it again"), "{error}");
}

#[test]
fn a_file_that_is_touched_after_opening_is_an_error_until_it_has_its_time_back() {
    let folder = tempfile::tempdir().unwrap();
    let (file, _) = file(folder.path(), "touched", MIB);
    let opened = fs::File::options().write(true).open(file.path()).unwrap();
    let before = opened.metadata().unwrap().modified().unwrap();
    opened.set_modified(before + std::time::Duration::from_secs(3)).unwrap();
    let said = read_one(&file, 0, MIB, 0, &ReadOptions::default()).unwrap_err().to_string();
    let since = before.duration_since(std::time::UNIX_EPOCH).unwrap();
    let time = format!("touch -d @{}.{:09}", since.as_secs(), since.subsec_nanos());
    assert!(said.contains("written to or touched") && said.ends_with(&time), "{said}");
    opened.set_modified(before).unwrap();
    read_one(&file, 0, MIB, 0, &ReadOptions::default()).unwrap();
}

#[test]
fn a_file_that_is_replaced_is_still_the_old_one() {
    let folder = tempfile::tempdir().unwrap();
    let (file, bytes) = file(folder.path(), "old", MIB);
    fs::write(folder.path().join("new"), vec![0; MIB]).unwrap();
    fs::rename(folder.path().join("new"), file.path()).unwrap();
    for mode in MODES {
        assert!(read_one(&file, 0, MIB, 0, &with(mode)).unwrap().0 == bytes);
    }
}

#[test]
fn progress_counts_every_byte_once() {
    let folder = tempfile::tempdir().unwrap();
    let (file, _) = file(folder.path(), "counted", 20 * MIB);
    for mode in MODES {
        let seen = AtomicU64::new(0);
        let count = |bytes| {
            seen.fetch_add(bytes, Ordering::Relaxed);
        };
        let options = ReadOptions { progress: Some(&count), ..with(mode) };
        read_one(&file, 5, 19 * MIB, 0, &options).unwrap();
        assert_eq!(seen.load(Ordering::Relaxed), 19 * MIB as u64);
    }
}

#[test]
fn cancelling_stops_within_what_is_in_flight() {
    let folder = tempfile::tempdir().unwrap();
    let (file, _) = file(folder.path(), "cancelled", 160 * MIB);
    for mode in MODES {
        let (cancel, seen) = (Cancel::new(), AtomicU64::new(0));
        let count = |bytes| {
            seen.fetch_add(bytes, Ordering::Relaxed);
            cancel.cancel();
        };
        let options = ReadOptions { progress: Some(&count), cancel: Some(&cancel), ..with(mode) };
        let error = read_one(&file, 0, 160 * MIB, 0, &options).unwrap_err();
        assert!(matches!(error, CheckpointError::Cancelled), "{error}");
        assert!(seen.load(Ordering::Relaxed) <= 80 * MIB as u64, "{mode:?} went on for {seen:?}");
        seen.store(0, Ordering::Relaxed);
        read_one(&file, 0, 160 * MIB, 0, &options).unwrap_err();
        assert_eq!(seen.load(Ordering::Relaxed), 0, "cancelled before");
    }
}

/// Jobs over two files: which file, where, how long, and how far the target is from aligned.
fn jobs() -> impl Strategy<Value = Vec<(bool, usize, usize, usize)>> {
    let one = (any::<bool>(), 0..11 * MIB, 0_u32..24, any::<usize>(), 0_usize..3);
    let one = one.prop_map(|(second, at, log, size, shift)| {
        let size = size % (1 << log);
        // Tensors often begin where the one before ended, or at pages.
        let at = if size % 3 == 0 { at / 4096 * 4096 } else { at };
        (second, at, size.min(11 * MIB - at), [0, 8, 4095][shift])
    });
    proptest::collection::vec(one, 0..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn every_way_gives_the_same_bytes(jobs in jobs(), threads in 0_usize..5) {
        let folder = tempfile::tempdir().unwrap();
        let files = [file(folder.path(), "a", 11 * MIB), file(folder.path(), "bb", 11 * MIB)];
        for (file, _) in &files {
            let file = file.file();
            file.sync_all().unwrap();
            rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed).unwrap();
        }
        for mode in MODES {
            let mut targets: Vec<_> =
                jobs.iter().map(|(_, _, size, shift)| (vec![0; size + shift + 4096], *shift, *size)).collect();
            let list = jobs.iter().zip(&mut targets).map(|((second, at, _, _), (memory, shift, size))| {
                let start = memory.as_ptr().addr().wrapping_neg() % 4096;
                let start = if start + *shift + *size > memory.len() { 0 } else { start + *shift };
                let target = &mut memory[start..start + *size];
                *shift = start;
                ReadJob { name: "x", file: &files[usize::from(*second)].0, offset: *at as u64, target }
            });
            let mut list: Vec<_> = list.collect();
            let options = ReadOptions { mode, threads, ..ReadOptions::default() };
            let report = read(&mut list, &options).unwrap();
            for ((second, at, size, _), (memory, start, _)) in jobs.iter().zip(&targets) {
                let wanted = &files[usize::from(*second)].1[*at..at + size];
                prop_assert!(&memory[*start..start + size] == wanted, "{mode:?}: {size} bytes at {at}");
            }
            prop_assert!(report.bytes_read >= report.bytes_asked);
        }
    }
}

#[test]
fn no_descriptor_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (file, _) = file(folder.path(), "again", 9 * MIB);
    for mode in MODES {
        read_one(&file, 0, 9 * MIB, 0, &with(mode)).unwrap();
    }
    let left = fs::read_dir("/proc/self/fd").unwrap().filter_map(|fd| fs::read_link(fd.unwrap().path()).ok());
    let left = left.filter(|target| target.ends_with("again")).count();
    assert_eq!(left, 1, "only the open file itself");
}
