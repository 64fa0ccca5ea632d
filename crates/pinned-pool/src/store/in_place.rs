//! Which tensors may stay where they are, and the page ranges to register for them.
#![forbid(unsafe_code)]

use std::ops::Range;

use gpu_driver::Bytes;

use crate::maps::{HostMaps, MemoryKind};
use crate::ranges::Ranges;
use crate::system;

/// Tensors that share one unbroken run of pages.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) pages: Range<u64>,
    /// Positions in the group.
    pub(super) members: Vec<usize>,
}

/// Whether any tensors form a run of `shortest` bytes, whatever their memory is: if not, the maps, of which a process has
/// thousands, need not be read.
pub(super) fn may_stay(tensors: &[Range<u64>], shortest: Bytes) -> bool {
    let page = system::page_size();
    let mut merged = Ranges::default();
    for pages in tensors.iter().filter_map(|bytes| whole_pages(bytes, page)) {
        merged.insert(pages);
    }
    merged.iter().any(|run| run.end - run.start >= shortest.0)
}

/// The runs of at least `shortest` bytes that tensors, given by their address ranges, form in anonymous memory. Tensors
/// that share a page, or whose pages touch, are one run, so that no page is registered twice.
pub(super) fn candidates(tensors: &[Range<u64>], maps: &HostMaps, shortest: Bytes) -> Vec<Candidate> {
    let page = system::page_size();
    let pages: Vec<_> = tensors.iter().map(|bytes| anonymous_pages(bytes, maps, page)).collect();
    let mut merged = Ranges::default();
    for range in pages.iter().flatten() {
        merged.insert(range.clone());
    }
    let long = merged.iter().filter(|run| run.end - run.start >= shortest.0);
    let mut candidates: Vec<Candidate> = long.map(|pages| Candidate { pages, members: Vec::new() }).collect();
    for (index, range) in pages.iter().enumerate() {
        let Some(range) = range else { continue };
        // The runs are in order and none holds part of a tensor.
        let home = candidates.partition_point(|candidate| candidate.pages.end <= range.start);
        if let Some(candidate) = candidates.get_mut(home).filter(|home| home.pages.contains(&range.start)) {
            candidate.members.push(index);
        }
    }
    candidates
}

/// The whole pages a tensor touches, if all of them are anonymous memory.
fn anonymous_pages(bytes: &Range<u64>, maps: &HostMaps, page: u64) -> Option<Range<u64>> {
    whole_pages(bytes, page).filter(|pages| maps.kind(pages.clone()) == MemoryKind::Anonymous)
}

/// The whole pages a tensor touches, unless it is empty.
fn whole_pages(bytes: &Range<u64>, page: u64) -> Option<Range<u64>> {
    let end = bytes.end.checked_next_multiple_of(page)?;
    (!bytes.is_empty()).then_some(bytes.start / page * page..end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages 16 to 32 anonymous, 32 to 40 a private file, 40 to 48 the heap, 48 to 56 anonymous.
    fn maps() -> HostMaps {
        let page = system::page_size();
        let line = |from: u64, to: u64, rest: &str| format!("{:x}-{:x} {rest}\n", from * page, to * page);
        HostMaps::parse(
            &[
                line(16, 32, "rw-p 0 0:0 0"),
                line(32, 40, "rw-p 0 8:1 5 /weights"),
                line(40, 48, "rw-p 0 0:0 0 [heap]"),
                line(48, 56, "rw-p 0 0:0 0"),
            ]
            .concat(),
        )
    }

    /// Runs as (first page, end page, members) of tensors given in quarters of a page.
    fn runs(tensors: &[Range<u64>], shortest: u64) -> Vec<(u64, u64, Vec<usize>)> {
        let page = system::page_size();
        let bytes: Vec<_> =
            tensors.iter().map(|range| range.start * page / 4..range.end * page / 4).collect();
        let found = candidates(&bytes, &maps(), Bytes(shortest * page));
        found.into_iter().map(|run| (run.pages.start / page, run.pages.end / page, run.members)).collect()
    }

    #[test]
    fn tensors_on_shared_or_touching_pages_are_one_run() {
        assert_eq!(runs(&[64..70, 71..80, 80..84], 1), [(16, 21, vec![0, 1, 2])]);
        assert_eq!(runs(&[100..104, 64..68], 1), [(16, 17, vec![1]), (25, 26, vec![0])]);
    }

    #[test]
    fn short_runs_stay_out() {
        assert_eq!(runs(&[64..72, 76..84, 84..88], 3), [(19, 22, vec![1, 2])]);
        assert!(runs(&[64..72, 76..80], 3).is_empty());
    }

    #[test]
    fn only_anonymous_memory_is_a_candidate() {
        assert!(runs(&[128..140, 160..192, 8..12, 130..130], 1).is_empty(), "file, heap, unmapped, empty");
        assert!(runs(&[120..130, 188..194], 1).is_empty(), "partly in a file or the heap");
        assert_eq!(runs(&[120..128, 128..132, 192..193], 1), [(30, 32, vec![0]), (48, 49, vec![2])]);
    }
}
