//! What reading takes besides what was asked for: bytes from the device, memory, the page cache. One test, as it counts
//! for the whole process.
#![allow(clippy::unwrap_used, reason = "a failing test may say so by panicking")]

use std::fs;
use std::io::Write;
use std::sync::Arc;

use checkpoint::io::{IoMode, OpenFile, ReadJob, ReadOptions, read};

const MODES: [IoMode; 4] = [IoMode::Auto, IoMode::Buffered, IoMode::Direct, IoMode::Uring];
const MIB: u64 = 1 << 20;
const SIZE: u64 = 192 * MIB;
/// A tensor; it begins at no page.
const TENSOR: u64 = MIB + 40;

/// A number of a file in `/proc/self`, in its own unit.
fn counter(file: &str, name: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/self/{file}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.trim().trim_end_matches("kB").trim().parse().unwrap()
}

fn drop_from_cache(file: &OpenFile) {
    file.file().sync_all().unwrap();
    rustix::fs::fadvise(file.file(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
}

#[test]
fn reading_takes_what_it_must() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let mut out = fs::File::create(&path).unwrap();
    let piece: Vec<u8> = (0..MIB).map(|i| ((i * 2_654_435_761) >> 13) as u8).collect();
    (0..SIZE / MIB).for_each(|_| out.write_all(&piece).unwrap());
    drop(out);
    let file = Arc::new(OpenFile::open(&path).unwrap());
    for mode in MODES {
        few_tensors(&file, mode);
    }
    for mode in MODES {
        one_large(&file, mode);
    }
}

/// Every tenth tensor: about a tenth of the bytes, whoever counts.
fn few_tensors(file: &Arc<OpenFile>, mode: IoMode) {
    let offsets: Vec<_> = (0..SIZE / TENSOR).step_by(10).map(|i| 8 + i * TENSOR).collect();
    let mut memory = vec![0; offsets.len() * TENSOR as usize];
    drop_from_cache(file);
    let before = (counter("io", "rchar:"), counter("io", "read_bytes:"));
    let jobs = offsets.iter().zip(memory.chunks_mut(TENSOR as usize));
    let mut jobs: Vec<_> =
        jobs.map(|(offset, target)| ReadJob { name: "x", file, offset: *offset, target }).collect();
    let report = read(&mut jobs, &ReadOptions { mode, ..ReadOptions::default() }).unwrap();
    let asked = report.bytes_asked;
    let most = asked + asked / 20 + MIB / 4;
    assert!(asked * 9 < SIZE, "about a tenth");
    assert!((asked..=most).contains(&report.bytes_read), "{report:?}");
    let after = (counter("io", "rchar:"), counter("io", "read_bytes:"));
    // Files of /proc are read besides, some 20 KiB.
    assert!(after.0 - before.0 <= most, "{mode:?}: calls gave {} of {asked}", after.0 - before.0);
    assert!(after.1 - before.1 <= most, "{mode:?}: the device gave {} of {asked}", after.1 - before.1);
}

/// One tensor longer than all buffers together, into memory that is there already.
fn one_large(file: &Arc<OpenFile>, mode: IoMode) {
    let mut target = vec![1; SIZE as usize - 8];
    drop_from_cache(file);
    let cold = file.resident_fraction(0..SIZE).is_some_and(|resident| resident < 0.02);
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = counter("status", "VmRSS:");
    let mut jobs = [ReadJob { name: "large", file, offset: 8, target: &mut target }];
    let report = read(&mut jobs, &ReadOptions { mode, ..ReadOptions::default() }).unwrap();
    let grown = counter("status", "VmHWM:").saturating_sub(before) >> 10;
    assert!(grown <= 90, "{mode:?} took {grown} MiB besides the target");
    let past = matches!(report.files[0].choice.mode, IoMode::Direct | IoMode::Uring);
    if cold && past {
        let resident = file.resident_fraction(0..SIZE).unwrap();
        assert!(resident < 0.02, "{mode:?} left {resident} in the page cache");
    }
}
