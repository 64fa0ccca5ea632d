//! Which units share ring bytes.

use std::ops::Range;

use super::ground::Ground;
use super::ring::Placement;
use crate::model::UnitId;
use crate::unit_set::{UnitSet, clear, set};

/// For each unit the others that share ring bytes with it.
///
/// A ring of one slot has a quadratic number of conflicts, so nothing here looks at pairs: each page knows its occupants as
/// sets of bits, one row for those that reach its first byte, one for its last, and rows for those in between.
pub(super) fn conflicts(ground: &Ground, placement: &Placement) -> Vec<UnitSet> {
    let units = ground.units.len();
    let words = units.div_ceil(64);
    let ids = || (0..units as u32).map(UnitId);
    let mut occupants = vec![Vec::new(); placement.ring as usize];
    for unit in ids() {
        for part in placement.parts(unit, ground.granule) {
            occupants[part.page as usize].push((unit, part.bytes));
        }
    }
    let pages: Vec<Page> = occupants.iter().map(|found| Page::new(found, ground.granule, words)).collect();
    let mut found = vec![0_u64; words];
    let mut all = Vec::with_capacity(units);
    for unit in ids() {
        found.fill(0);
        for part in placement.parts(unit, ground.granule) {
            pages[part.page as usize].meet(&part.bytes, &mut found);
        }
        if !placement.streamed[unit.0 as usize].is_empty() {
            clear(&mut found, unit);
        }
        all.push(UnitSet::of_words(&found));
    }
    all
}

/// How many occupants are looked at one by one before a row of bits stands for all before them.
const STRIDE: usize = 64;

/// The occupants of a ring page, by where their bytes begin and by where they end: one misses an interval if it begins at
/// or behind its end, or ends at or before its start. Two that miss it for different reasons are different.
struct Page {
    granule: u64,
    words: usize,
    present: Vec<u64>,
    /// Sorted by start, those from the page's first byte on left out.
    starts: Misses,
    /// Sorted by the distance of the end from the page's end, those that reach it left out.
    ends: Misses,
    /// Those with two parts in the page.
    twice: Vec<(UnitId, Range<u64>)>,
}

impl Page {
    fn new(occupants: &[(UnitId, Range<u64>)], granule: u64, words: usize) -> Self {
        let mut present = vec![0; words];
        let (mut starts, mut ends, mut twice) = (Vec::new(), Vec::new(), Vec::new());
        // A unit as large as the ring comes back to its first page: its parts stand next to one another here.
        for parts in occupants.chunk_by(|a, b| a.0 == b.0) {
            let [(unit, bytes)] = parts else {
                twice.extend_from_slice(parts);
                continue;
            };
            set(&mut present, *unit);
            if bytes.start > 0 {
                starts.push((granule - bytes.start, *unit));
            }
            if bytes.end < granule {
                ends.push((bytes.end, *unit));
            }
        }
        Self {
            granule,
            words,
            present,
            starts: Misses::new(starts, words),
            ends: Misses::new(ends, words),
            twice,
        }
    }

    /// Adds the occupants that have bytes in the interval.
    fn meet(&self, bytes: &Range<u64>, found: &mut [u64]) {
        for (unit, other) in &self.twice {
            if other.start < bytes.end && bytes.start < other.end {
                set(found, *unit);
            }
        }
        if *bytes == (0..self.granule) {
            found.iter_mut().zip(&self.present).for_each(|(found, present)| *found |= present);
            return;
        }
        let mut met = self.present.clone();
        self.starts.remove(self.granule - bytes.end, self.words, &mut met);
        self.ends.remove(bytes.start, self.words, &mut met);
        found.iter_mut().zip(&met).for_each(|(found, met)| *found |= met);
    }
}

/// Occupants sorted by a key, with the set of all before every [`STRIDE`]th.
struct Misses {
    sorted: Vec<(u64, UnitId)>,
    before: Vec<u64>,
}

impl Misses {
    fn new(mut sorted: Vec<(u64, UnitId)>, words: usize) -> Self {
        sorted.sort_unstable();
        let mut before = Vec::with_capacity(sorted.len() / STRIDE * words);
        let mut row = vec![0; words];
        for chunk in sorted.chunks_exact(STRIDE) {
            for &(_, unit) in chunk {
                set(&mut row, unit);
            }
            before.extend_from_slice(&row);
        }
        Self { sorted, before }
    }

    /// Takes those whose key is at most `limit` out of a set.
    fn remove(&self, limit: u64, words: usize, set: &mut [u64]) {
        let count = self.sorted.partition_point(|&(key, _)| key <= limit);
        let rows = count / STRIDE;
        if let Some(row) = rows.checked_sub(1) {
            let row = &self.before[row * words..(row + 1) * words];
            set.iter_mut().zip(row).for_each(|(set, row)| *set &= !row);
        }
        self.sorted[rows * STRIDE..count].iter().for_each(|&(_, unit)| clear(set, unit));
    }
}
