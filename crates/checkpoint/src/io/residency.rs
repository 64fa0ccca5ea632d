//! What of a file lies in the page cache. `cachestat` counts it; where the kernel does not have it or allow it, one-byte
//! reads that refuse to wait sample it. `mincore` is not asked: it says "all" of files that are not the caller's.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;

use rustix::io::{Errno, ReadWriteFlags};

use crate::mapping::system;

/// How many places are sampled.
const SAMPLES: u64 = 64;

/// The part of a range's pages that lies in the page cache; `None` where nothing tells.
pub(crate) fn fraction(file: &File, range: Range<u64>) -> Option<f64> {
    counted(file, &range).or_else(|| sampled(file, &range))
}

fn counted(file: &File, range: &Range<u64>) -> Option<f64> {
    let size = range.end.saturating_sub(range.start);
    if size == 0 {
        return Some(1.0);
    }
    let page = system::page_size() as u64;
    let pages = range.end.div_ceil(page) - range.start / page;
    let cached = system::cached_pages(file, range.start, size).ok()?;
    Some((cached as f64 / pages as f64).min(1.0))
}

/// Reads single bytes at even distances without waiting for the device.
fn sampled(file: &File, range: &Range<u64>) -> Option<f64> {
    let size = range.end.saturating_sub(range.start);
    if size == 0 {
        return Some(1.0);
    }
    let samples = SAMPLES.min(size);
    let mut present = 0_u64;
    for index in 0..samples {
        let at = range.start + (u128::from(size) * u128::from(index) / u128::from(samples)) as u64;
        let mut byte = [0];
        let mut target = [IoSliceMut::new(&mut byte)];
        match rustix::io::preadv2(file, &mut target, at, ReadWriteFlags::NOWAIT) {
            Ok(1..) => present += 1,
            Ok(0) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    Some(present as f64 / samples as f64)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failing test may say so by panicking")]

    use std::io::Write;

    use rustix::fs::Advice;

    use super::*;

    #[test]
    fn what_was_dropped_from_the_cache_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut file = File::create_new(&path).unwrap();
        file.write_all(&vec![7; 8 << 20]).unwrap();
        file.sync_all().unwrap();
        let file = File::open(&path).unwrap();
        let whole = 0..8 << 20;
        for method in [counted, sampled] {
            std::fs::read(&path).unwrap();
            let Some(before) = method(&file, &whole) else { continue };
            assert!(before > 0.98, "{before} of a file that was just read");
            assert_eq!(method(&file, &(5..5)), Some(1.0));
            rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
            let after = method(&file, &whole).unwrap();
            // A file system without a device, as tmpfs, keeps everything.
            assert!(!(0.02..=0.98).contains(&after), "{after} of a file that was dropped");
        }
    }
}
