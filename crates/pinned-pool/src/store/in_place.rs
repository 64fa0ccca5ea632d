//! Which tensors may stay where they are, and the page ranges to register for them.
//!
//! The driver refuses a copy whose host memory is registered in part. Whole pages are registered, so that a tensor stays
//! only where its pages hold nobody else's bytes, and with all of its pages in one registration:
//!
//! ```text
//! pages        |        |        |        |        |        |        |
//! stays        [ aligned tensor  ][ a     ][  b    ][ c     ]             all six pages are full of tensors
//! copied          [ small tensor      ] somebody else's                   its pages may hold others' bytes
//! stays        hd[ a tensor of min_in_place and more ........  ]          its allocation has pages of its own
//! ```
#![forbid(unsafe_code)]

use std::ops::Range;

use gpu_driver::Bytes;

use super::locked::Locked;
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

/// The runs of at least `shortest` bytes that tensors, given by their address ranges, form in anonymous memory, of pages
/// that hold nobody else's bytes. Tensors that share a page, or whose pages touch, are in one run. No run has a page of
/// `taken`, which are registered.
pub(super) fn candidates(
    tensors: &[Range<u64>],
    maps: &HostMaps,
    taken: &Locked,
    shortest: Bytes,
) -> Vec<Candidate> {
    let page = system::page_size();
    let free = |pages: &Range<u64>| taken.missing(pages.clone()) == [pages.clone()];
    let usable = |(index, bytes)| Some((index, bytes, anonymous_pages(bytes, maps, page).filter(free)?));
    let mut members: Vec<(usize, &Range<u64>, Range<u64>)> =
        tensors.iter().enumerate().filter_map(usable).collect();
    // Each that goes may leave a neighbour on a page that is no longer all theirs.
    loop {
        let ours = ours(&members, shortest);
        let before = members.len();
        members.retain(|(_, _, pages)| ours.holding(pages.start).is_some_and(|run| run.end >= pages.end));
        if members.len() == before {
            break;
        }
    }
    let mut merged = Ranges::default();
    for (_, _, pages) in &members {
        merged.insert(pages.clone());
    }
    let long = merged.iter().filter(|run| run.end - run.start >= shortest.0);
    let mut candidates: Vec<Candidate> = long.map(|pages| Candidate { pages, members: Vec::new() }).collect();
    for (index, _, pages) in members {
        // The runs are in order and none holds part of a tensor.
        let home = candidates.partition_point(|candidate| candidate.pages.end <= pages.start);
        if let Some(candidate) = candidates.get_mut(home).filter(|home| home.pages.contains(&pages.start)) {
            candidate.members.push(index);
        }
    }
    candidates
}

/// The bytes known to be nobody else's: those of tensors, and the rest of the pages of a tensor that is so long that its
/// allocation has pages of its own.
fn ours(members: &[(usize, &Range<u64>, Range<u64>)], alone: Bytes) -> Ranges {
    let mut ours = Ranges::default();
    for (_, bytes, pages) in members {
        let is_alone = bytes.end - bytes.start >= alone.0;
        ours.insert(if is_alone { pages.clone() } else { (*bytes).clone() });
    }
    ours
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
#[expect(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]
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
        let found = candidates(&bytes, &maps(), &Locked::default(), Bytes(shortest * page));
        found.into_iter().map(|run| (run.pages.start / page, run.pages.end / page, run.members)).collect()
    }

    #[test]
    fn tensors_on_shared_or_touching_pages_are_one_run() {
        assert_eq!(runs(&[64..70, 70..80, 80..84], 5), [(16, 21, vec![0, 1, 2])]);
        assert_eq!(runs(&[100..104, 64..68], 1), [(16, 17, vec![1]), (25, 26, vec![0])]);
    }

    #[test]
    fn a_page_with_a_byte_of_others_is_in_no_run() {
        assert!(runs(&[65..80], 4).is_empty(), "others before");
        assert!(runs(&[64..79], 4).is_empty(), "others behind");
        assert!(
            runs(&[64..71, 72..84], 5).is_empty(),
            "others between: three pages are left, which is short"
        );
        // One that goes takes its neighbours with it up to the first border of pages.
        assert_eq!(runs(&[64..76, 76..82, 82..86, 86..91], 3), [(16, 19, vec![0])]);
        // Tensors may share bytes.
        assert_eq!(runs(&[64..73, 70..80, 64..80], 4), [(16, 20, vec![0, 1, 2])]);
    }

    #[test]
    fn a_long_tensor_has_its_pages_to_itself() {
        assert_eq!(runs(&[65..83], 4), [(16, 21, vec![0])]);
        // What shares its pages is of the same allocation, and stays if its other pages are full.
        assert_eq!(runs(&[65..83, 83..88, 89..91], 4), [(16, 22, vec![0, 1])]);
        assert_eq!(runs(&[65..83, 83..90], 4), [(16, 21, vec![0])]);
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
        assert_eq!(runs(&[120..128, 128..132, 192..196], 1), [(30, 32, vec![0]), (48, 49, vec![2])]);
    }
}
