//! Registering in pieces, smaller ones where large ones are refused.
#![forbid(unsafe_code)]

use std::collections::VecDeque;
use std::ops::Range;

use gpu_driver::Bytes;

use super::pieces::pieces;
use crate::error::{HostError, Result};
use crate::system;

/// The most that is registered in one call: drivers refuse 512 GiB.
const LONGEST: u64 = 64 << 30;

/// How many times as long as wanted a piece of the slab may be so that no tensor is cut.
const STRETCH: u64 = 4;

/// Where a run of pages may be cut.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cut<'a> {
    /// Anywhere: nobody is given the bytes but the copy engine.
    Anywhere,
    /// If possible between these.
    Between(&'a [Range<u64>]),
    /// Only between these.
    Whole(&'a [Range<u64>]),
}

/// The sizes of pieces, and which one is in use. One that was refused is not tried again.
#[derive(Debug)]
pub(super) struct Ladder {
    sizes: Vec<u64>,
    rung: usize,
}

impl Ladder {
    pub(super) fn new(piece: Bytes, chunk: Bytes) -> Self {
        let page = system::page_size();
        let sizes = [piece.0, chunk.0, chunk.0 / 4, chunk.0 / 16];
        let mut sizes: Vec<u64> = sizes.map(|size| (size / page * page).max(page)).into();
        sizes.sort_unstable_by(|one, other| other.cmp(one));
        sizes.dedup();
        Self { sizes, rung: 0 }
    }

    /// Calls `lock` for the pieces of `run`, in order, smaller ones from where one was refused.
    ///
    /// # Errors
    /// The refusal of a piece that cannot be cut further, or an error that no smaller piece mends. What was locked before
    /// stays so.
    pub(super) fn lock(
        &mut self,
        run: Range<u64>,
        cut: Cut<'_>,
        lock: &mut dyn FnMut(Range<u64>) -> Result<()>,
    ) -> Result<()> {
        let mut todo = self.pieces(self.rung, run.clone(), cut);
        while let Some(piece) = todo.pop_front() {
            let Err(reason) = lock(piece.clone()) else { continue };
            if !is_refusal(&reason) {
                return Err(reason);
            }
            // The same call again would be refused again.
            let smaller = |rung: &usize| self.pieces(*rung, piece.clone(), cut).len() > 1;
            let Some(rung) = (self.rung + 1..self.sizes.len()).find(smaller) else { return Err(reason) };
            tracing::debug!(%reason, size = self.sizes[rung], "host page-lock goes on in smaller pieces");
            self.rung = rung;
            todo = self.pieces(rung, piece.start..run.end, cut);
        }
        Ok(())
    }

    fn pieces(&self, rung: usize, run: Range<u64>, cut: Cut<'_>) -> VecDeque<Range<u64>> {
        let size = self.sizes.get(rung).copied().unwrap_or(LONGEST);
        let pieces = match cut {
            Cut::Anywhere => pieces(run, &[], size, size),
            Cut::Between(tensors) => pieces(run, tensors, size, size.saturating_mul(STRETCH).min(LONGEST)),
            Cut::Whole(tensors) => pieces(run, tensors, size, LONGEST),
        };
        pieces.into()
    }
}

/// Whether a smaller piece may be taken where this one was not.
fn is_refusal(reason: &HostError) -> bool {
    matches!(reason, HostError::Register { .. } | HostError::RegisterLimit { .. })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    fn refused(size: u64) -> HostError {
        HostError::RegisterLimit { asked: Bytes(size), limit: Bytes::ZERO, registered: Bytes::ZERO }
    }

    /// What is tried and what is locked, in pages, of a run of 64 where `refuse` says no to a number of pages.
    fn climb(refuse: impl Fn(u64) -> bool) -> (Vec<u64>, u64, bool) {
        let mut ladder = Ladder::new(Bytes(64 * PAGE), Bytes(16 * PAGE));
        let (mut tried, mut locked) = (Vec::new(), 0);
        let done = ladder.lock(0..64 * PAGE, Cut::Anywhere, &mut |piece| {
            let pages = (piece.end - piece.start) / PAGE;
            tried.push(pages);
            if refuse(pages) {
                return Err(refused(pages));
            }
            locked += pages;
            Ok(())
        });
        (tried, locked, done.is_ok())
    }

    #[test]
    fn what_is_taken_whole_is_one_piece() {
        assert_eq!(climb(|_| false), (vec![64], 64, true));
    }

    #[test]
    fn smaller_pieces_are_tried_until_one_is_taken() {
        assert_eq!(climb(|pages| pages > 16), (vec![64, 16, 16, 16, 16], 64, true));
        let (tried, locked, done) = climb(|pages| pages > 4);
        assert_eq!((tried.len(), locked, done), (2 + 16, 64, true));
    }

    #[test]
    fn a_driver_that_refuses_everything_is_asked_once_a_size() {
        assert_eq!(climb(|_| true), (vec![64, 16, 4, 1], 0, false));
    }

    #[test]
    fn a_size_that_was_refused_is_not_tried_again() {
        let mut ladder = Ladder::new(Bytes(64 * PAGE), Bytes(16 * PAGE));
        let mut tried = Vec::new();
        for start in [0, 64 * PAGE] {
            let done = ladder.lock(start..start + 32 * PAGE, Cut::Anywhere, &mut |piece| {
                tried.push((piece.end - piece.start) / PAGE);
                if tried.len() == 1 { Err(refused(32)) } else { Ok(()) }
            });
            done.unwrap();
        }
        assert_eq!(tried, [32, 16, 16, 16, 16]);
    }

    #[test]
    fn tensors_are_kept_whole_where_they_must() {
        let tensors = [0..10 * PAGE, 10 * PAGE..64 * PAGE];
        let mut ladder = Ladder::new(Bytes(8 * PAGE), Bytes(8 * PAGE));
        let mut tried = Vec::new();
        let mut lock = |piece: Range<u64>| {
            tried.push(piece.start / PAGE..piece.end / PAGE);
            Ok(())
        };
        ladder.lock(0..64 * PAGE, Cut::Whole(&tensors), &mut lock).unwrap();
        ladder.lock(0..64 * PAGE, Cut::Between(&tensors), &mut lock).unwrap();
        assert_eq!(tried[..2], [0..10, 10..64]);
        assert_eq!(tried[2..5], [0..10, 10..18, 18..26]);
    }

    #[test]
    fn an_error_that_no_size_mends_ends_it() {
        let mut ladder = Ladder::new(Bytes(8 * PAGE), Bytes(PAGE));
        let mut calls = 0;
        let done = ladder.lock(0..64 * PAGE, Cut::Anywhere, &mut |_| {
            calls += 1;
            Err(HostError::Cancelled)
        });
        assert_eq!((done, calls), (Err(HostError::Cancelled), 1));
    }
}
