//! How the slab is cut where it cannot be registered at once: if possible so that each tensor lies in one piece.
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::system;

/// Cuts a run of pages into pieces of at most `wanted` bytes. A cut that would go through one of `tensors`, which are in
/// order, is moved to the last border of pages before it that goes through none, else to the first behind it. If that
/// piece exceeded `longest`, the tensor is cut all the same.
pub(super) fn pieces(run: Range<u64>, tensors: &[Range<u64>], wanted: u64, longest: u64) -> Vec<Range<u64>> {
    let page = system::page_size();
    let wanted = (wanted / page * page).max(page);
    let mut pieces = Vec::new();
    let mut start = run.start;
    while run.end - start > wanted {
        let at = start + wanted;
        let end = Some(before(tensors, at, page)).filter(|&cut| cut > start);
        let end = end.or_else(|| behind(tensors, at, page).filter(|&cut| cut - start <= longest));
        let end = end.unwrap_or(at).min(run.end);
        pieces.push(start..end);
        start = end;
    }
    if start < run.end {
        pieces.push(start..run.end);
    }
    pieces
}

/// The last border of pages up to `at` that is inside no tensor.
pub(super) fn before(tensors: &[Range<u64>], mut at: u64, page: u64) -> u64 {
    while let Some(tensor) = around(tensors, at) {
        at = tensor.start / page * page;
    }
    at
}

/// The first border of pages from `at` on that is inside no tensor.
pub(super) fn behind(tensors: &[Range<u64>], mut at: u64, page: u64) -> Option<u64> {
    while let Some(tensor) = around(tensors, at) {
        at = tensor.end.checked_next_multiple_of(page)?;
    }
    Some(at)
}

/// The tensor that has bytes on both sides of `at`.
fn around(tensors: &[Range<u64>], at: u64) -> Option<&Range<u64>> {
    let index = tensors.partition_point(|tensor| tensor.start < at).checked_sub(1)?;
    tensors.get(index).filter(|tensor| tensor.end > at)
}

#[cfg(test)]
#[expect(clippy::single_range_in_vec_init, reason = "lists of ranges, some of one")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Everything in quarters of a page.
    fn cut(run: Range<u64>, tensors: &[Range<u64>], wanted: u64, longest: u64) -> Vec<Range<u64>> {
        let quarter = system::page_size() / 4;
        let bytes = |range: &Range<u64>| range.start * quarter..range.end * quarter;
        let tensors: Vec<_> = tensors.iter().map(bytes).collect();
        let pieces = pieces(bytes(&run), &tensors, wanted * quarter, longest * quarter);
        pieces.iter().map(|piece| piece.start / quarter..piece.end / quarter).collect()
    }

    #[test]
    fn a_short_run_is_one_piece() {
        assert_eq!(cut(8..24, &[9..23], 16, 16), [8..24]);
        assert!(cut(8..8, &[], 16, 16).is_empty());
    }

    #[test]
    fn a_cut_goes_through_no_tensor_if_possible() {
        // Where the second tensor begins; in padding; at once if nothing is there.
        assert_eq!(cut(0..40, &[0..12, 12..36], 16, 32), [0..12, 12..36, 36..40]);
        assert_eq!(cut(0..40, &[0..11, 13..29, 29..40], 16, 16), [0..12, 12..28, 28..40]);
        assert_eq!(cut(0..40, &[], 16, 16), [0..16, 16..32, 32..40]);
        // Behind a tensor that is longer than a piece should be.
        assert_eq!(cut(0..40, &[0..27, 28..40], 16, 32), [0..28, 28..40]);
    }

    #[test]
    fn a_tensor_without_a_cut_near_it_is_cut() {
        assert_eq!(cut(0..40, &[0..40], 16, 16), [0..16, 16..32, 32..40]);
        assert_eq!(cut(0..40, &[0..40], 16, 32), [0..16, 16..40]);
        assert_eq!(cut(0..40, &[0..10, 10..20, 20..38], 8, 16), [0..8, 8..20, 20..28, 28..40]);
    }

    proptest! {
        #[test]
        fn pieces_are_the_run_and_cut_tensors_only_where_they_must(
            steps in proptest::collection::vec((0u64..3, 1u64..30), 1..20), wanted in 1u64..8, more in 0u64..8,
        ) {
            let mut tensors = Vec::new();
            let mut at = 0;
            for (gap, size) in steps {
                tensors.push(at + gap..at + gap + size);
                at += gap + size;
            }
            let (wanted, longest) = (wanted * 4, (wanted + more) * 4);
            let run = 0..at.next_multiple_of(4);
            let found = cut(run.clone(), &tensors, wanted, longest);
            let is_free = |cut: u64| !tensors.iter().any(|tensor| tensor.start < cut && cut < tensor.end);
            prop_assert_eq!((found[0].start, found[found.len() - 1].end), (run.start, run.end));
            prop_assert!(found.windows(2).all(|pair| pair[0].end == pair[1].start));
            for piece in &found {
                prop_assert!(piece.start < piece.end && piece.end - piece.start <= longest);
                prop_assert_eq!((piece.start % 4, piece.end % 4), (0, 0));
                if piece.end < run.end && !is_free(piece.end) {
                    let last = (piece.start + longest).min(run.end);
                    prop_assert!((piece.start + 1..=last).all(|cut| cut % 4 != 0 || !is_free(cut)), "{:?}", piece);
                }
            }
        }
    }
}
