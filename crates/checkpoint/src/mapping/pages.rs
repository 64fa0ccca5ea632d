//! Which pages of a private mapping were written to, from `/proc/self/pagemap`. The file is opened anew each time: one
//! opened before a fork would tell of the parent.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::system;

/// The page is one of a file's, or shared: not a private copy.
const OF_FILE: u64 = 1 << 61;
/// The page is swapped out, which only happens to private copies here.
const SWAPPED: u64 = 1 << 62;
/// The page is in memory.
const PRESENT: u64 = 1 << 63;
/// Entries read at a time: 256 KiB, which tell of 128 MiB.
const ENTRIES: usize = 32 * 1024;

/// Whether an entry tells of a page that was written to. Whatever is not plainly the file's counts as written.
fn written(entry: u64) -> bool {
    entry & SWAPPED != 0 || (entry & PRESENT != 0 && entry & OF_FILE == 0)
}

/// The runs of addresses within `range` whose pages were written to, merged, cut to `range`. An error where the system
/// does not tell.
pub(super) fn written_runs(range: &Range<usize>) -> io::Result<Vec<Range<usize>>> {
    let pagemap = File::open("/proc/self/pagemap")?;
    runs(range, system::page_size(), |first, buffer| pagemap.read_exact_at(buffer, first as u64 * 8))
}

/// The same over any source of entries: `read` fills a buffer with those from a page number on.
fn runs(
    range: &Range<usize>,
    page: usize,
    mut read: impl FnMut(usize, &mut [u8]) -> io::Result<()>,
) -> io::Result<Vec<Range<usize>>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    if range.is_empty() {
        return Ok(found);
    }
    let (first, last) = (range.start / page, range.end.div_ceil(page));
    let mut buffer = vec![0; 8 * ENTRIES.min(last - first)];
    let mut at = first;
    while at < last {
        let count = ENTRIES.min(last - at);
        let bytes = &mut buffer[..8 * count];
        read(at, bytes)?;
        let (entries, _) = bytes.as_chunks::<8>();
        for (number, entry) in (at..).zip(entries) {
            if written(u64::from_ne_bytes(*entry)) {
                let start = (number * page).max(range.start);
                let end = ((number + 1) * page).min(range.end);
                match found.last_mut() {
                    Some(before) if before.end == start => before.end = end,
                    _ => found.push(start..end),
                }
            }
        }
        at += count;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failing test may say so by panicking")]

    use super::*;

    #[test]
    fn only_what_is_plainly_the_files_counts_as_unwritten() {
        assert!(!written(0), "never touched, or dropped again");
        assert!(!written(PRESENT | OF_FILE));
        assert!(!written(PRESENT | OF_FILE | 1 << 56), "mapped by nobody else");
        assert!(written(PRESENT), "a private copy");
        assert!(written(SWAPPED) && written(SWAPPED | OF_FILE) && written(PRESENT | SWAPPED | OF_FILE));
    }

    #[test]
    fn runs_merge_and_are_cut_to_what_was_asked() {
        let entries = [0, PRESENT, PRESENT, PRESENT | OF_FILE, SWAPPED, 0];
        let read = |first: usize, buffer: &mut [u8]| {
            for (number, target) in (first..).zip(buffer.chunks_mut(8)) {
                target.copy_from_slice(&entries[number % entries.len()].to_ne_bytes());
            }
            Ok(())
        };
        assert_eq!(runs(&(0..60), 10, read).unwrap(), [10..30, 40..50]);
        assert_eq!(runs(&(15..44), 10, read).unwrap(), [15..30, 40..44]);
        assert_eq!(runs(&(12..13), 10, read).unwrap(), [Range { start: 12, end: 13 }]);
        assert_eq!(runs(&(12..12), 10, read).unwrap(), []);
        assert_eq!(runs(&(3..9), 10, read).unwrap(), []);
        // More pages than are read at a time: runs go on over the seam.
        let all = |_: usize, buffer: &mut [u8]| {
            buffer.fill(0xff);
            Ok(())
        };
        assert_eq!(
            runs(&(5..10 * (2 * ENTRIES + 7)), 10, all).unwrap(),
            [Range { start: 5, end: 10 * (2 * ENTRIES + 7) }]
        );
    }

    #[test]
    fn a_source_that_does_not_tell_is_an_error() {
        assert!(runs(&(0..60), 10, |_, _| Err(io::ErrorKind::PermissionDenied.into())).is_err());
    }
}
