//! Which tensors may stay where they are, and the pages to register for them: only those of which every byte is a tensor's.
//!
//! ```text
//! | page 0  | page 1  | page 2  | page 3  | page 4  | page 5  | page 6  | page 7  | page 8  |
//! |  stranger  |###### tensor 0 #######|## tensor 1 ##|gap|##### tensor 2 #####|  stranger  |
//!                     |======== registered =========|         |=========|
//! ```
//!
//! An allocator puts others' memory on the pages where a tensor begins and ends, and a copy of memory that is registered
//! only in part is refused: registering such a page would fail the copies of whoever else is on it. A gap is nobody's
//! only for the allocator to know. What is left over, less than a page at each end, is copied like a small tensor.
#![forbid(unsafe_code)]

use std::ops::Range;

use gpu_driver::Bytes;

use crate::maps::{HostMaps, MemoryKind};
use crate::ranges::Ranges;
use crate::system;

/// Whole pages of tensors that lie side by side.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) pages: Range<u64>,
    /// Positions in the group of the tensors on these pages.
    pub(super) members: Vec<usize>,
}

/// Whether any tensors form a run of `shortest` bytes, whatever their memory is: if not, the maps, of which a process has
/// thousands, need not be read.
pub(super) fn may_stay(tensors: &[Range<u64>], shortest: Bytes) -> bool {
    !page_runs(tensors.iter(), system::page_size(), shortest).is_empty()
}

/// The runs of at least `shortest` bytes of whole pages that tensors, given by their address ranges, form in anonymous
/// memory. Tensors that touch are one run; no two runs share a page.
pub(super) fn candidates(tensors: &[Range<u64>], maps: &HostMaps, shortest: Bytes) -> Vec<Candidate> {
    let page = system::page_size();
    let anonymous = |bytes: &Range<u64>| maps.kind(bytes.clone()) == MemoryKind::Anonymous;
    let stay: Vec<bool> = tensors.iter().map(anonymous).collect();
    let staying = || tensors.iter().enumerate().filter(|&(index, _)| stay[index]);
    let runs = page_runs(staying().map(|(_, bytes)| bytes), page, shortest);
    let mut candidates: Vec<Candidate> =
        runs.into_iter().map(|pages| Candidate { pages, members: Vec::new() }).collect();
    for (index, bytes) in staying() {
        // The runs are in order, and a tensor, being of one piece, is on the pages of one at most.
        let home = candidates.partition_point(|candidate| candidate.pages.end <= bytes.start);
        if let Some(candidate) = candidates.get_mut(home).filter(|home| home.pages.start < bytes.end) {
            candidate.members.push(index);
        }
    }
    candidates
}

/// The runs of whole pages, of at least `shortest` bytes, all of whose bytes are tensors'.
fn page_runs<'a>(
    tensors: impl Iterator<Item = &'a Range<u64>>,
    page: u64,
    shortest: Bytes,
) -> Vec<Range<u64>> {
    let mut merged = Ranges::default();
    tensors.for_each(|bytes| merged.insert(bytes.clone()));
    let pages = merged.iter().filter_map(|run| whole_pages(&run, page));
    pages.filter(|run| run.end - run.start >= shortest.0).collect()
}

/// The pages that lie wholly in `bytes`.
fn whole_pages(bytes: &Range<u64>, page: u64) -> Option<Range<u64>> {
    let pages = bytes.start.checked_next_multiple_of(page)?..bytes.end / page * page;
    (!pages.is_empty()).then_some(pages)
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
    fn tensors_that_touch_are_one_run() {
        assert_eq!(runs(&[64..70, 70..80, 80..84], 1), [(16, 21, vec![0, 1, 2])]);
        assert_eq!(runs(&[100..104, 64..68], 1), [(16, 17, vec![1]), (25, 26, vec![0])]);
    }

    #[test]
    fn a_page_with_any_other_byte_stays_out() {
        assert_eq!(runs(&[65..75, 76..76], 1), [(17, 18, vec![0])], "strangers at both ends");
        assert_eq!(runs(&[64..70, 71..80], 1), [(16, 17, vec![0]), (18, 20, vec![1])], "a gap");
        assert_eq!(
            runs(&[65..68, 68..76, 76..79], 1),
            [(17, 19, vec![1])],
            "nothing of the outer ones is left"
        );
        assert_eq!(runs(&[66..70, 70..72], 1), [(17, 18, vec![0, 1])], "a page of two tensors");
        assert!(runs(&[65..71, 73..74], 1).is_empty(), "no whole page");
    }

    #[test]
    fn tensors_that_overlap_are_one_run() {
        assert_eq!(runs(&[64..76, 66..70, 74..80], 1), [(16, 20, vec![0, 1, 2])]);
    }

    #[test]
    fn runs_whose_whole_pages_are_too_few_stay_out() {
        assert_eq!(runs(&[64..72, 76..84, 84..88], 3), [(19, 22, vec![1, 2])]);
        assert!(runs(&[64..72, 77..88], 3).is_empty());
        assert!(may_stay(&[64 * 4096..70 * 4096, 1..2], Bytes(4096)));
        assert!(!may_stay(&[64 * 4096 + 1..72 * 4096 - 1, 1..2], Bytes(8 * 4096)));
    }

    #[test]
    fn only_anonymous_memory_is_a_candidate() {
        assert!(runs(&[128..140, 160..192, 8..12, 130..130], 1).is_empty(), "file, heap, unmapped, empty");
        assert!(runs(&[120..130, 188..194], 1).is_empty(), "partly in a file or the heap");
        assert_eq!(runs(&[120..128, 128..132, 192..196], 1), [(30, 32, vec![0]), (48, 49, vec![2])]);
    }
}
