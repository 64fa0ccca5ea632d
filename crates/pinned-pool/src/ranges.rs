//! Sets of addresses as sorted ranges that neither overlap nor touch: merged, subtracted, measured.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::ops::Range;

/// A set of `u64`s, kept as start → end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Ranges(BTreeMap<u64, u64>);

impl Ranges {
    /// Adds a range; ranges that overlap or touch become one.
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let mut merged = range;
        if let Some((&start, &end)) = self.0.range(..merged.start).next_back()
            && end >= merged.start
        {
            merged.start = start;
            merged.end = merged.end.max(end);
        }
        while let Some((&start, &end)) = self.0.range(merged.start..=merged.end).next() {
            self.0.remove(&start);
            merged.end = merged.end.max(end);
        }
        self.0.insert(merged.start, merged.end);
    }

    /// Takes a range out.
    pub(crate) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        for piece in self.overlapping(range.clone()) {
            self.0.remove(&piece.start);
            if piece.start < range.start {
                self.0.insert(piece.start, range.start);
            }
            if piece.end > range.end {
                self.0.insert(range.end, piece.end);
            }
        }
    }

    /// Whether any of `range` is in the set.
    pub(crate) fn overlaps(&self, range: Range<u64>) -> bool {
        !range.is_empty() && self.0.range(..range.end).next_back().is_some_and(|(_, &end)| end > range.start)
    }

    /// The range that holds `point`.
    pub(crate) fn holding(&self, point: u64) -> Option<Range<u64>> {
        let (&start, &end) = self.0.range(..=point).next_back()?;
        (end > point).then_some(start..end)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().map(|(&start, &end)| start..end)
    }

    /// How many numbers are in the set.
    pub(crate) fn total(&self) -> u64 {
        self.iter().map(|range| range.end - range.start).sum()
    }

    /// Whole members that overlap `range`, in order.
    fn overlapping(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let first = self.holding(range.start).map_or(range.start, |piece| piece.start);
        self.0.range(first..range.end.max(first)).map(|(&start, &end)| start..end).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn members(ranges: &Ranges) -> BTreeSet<u64> {
        ranges.iter().flatten().collect()
    }

    proptest! {
        #[test]
        fn behaves_as_a_plain_set(steps in proptest::collection::vec((any::<bool>(), 0u64..60, 0u64..20), 1..40)) {
            let mut ranges = Ranges::default();
            let mut model = BTreeSet::new();
            for (insert, start, length) in steps {
                let range = start..start + length;
                let overlaps = range.clone().any(|point| model.contains(&point));
                prop_assert_eq!(ranges.overlaps(range.clone()), overlaps);
                if insert {
                    ranges.insert(range.clone());
                    model.extend(range);
                } else {
                    ranges.remove(range.clone());
                    range.for_each(|point| { model.remove(&point); });
                }
                prop_assert_eq!(members(&ranges), model.clone());
                prop_assert_eq!(ranges.total(), model.len() as u64);
                // Touching ranges are one.
                let starts: Vec<_> = ranges.iter().collect();
                prop_assert!(starts.windows(2).all(|pair| pair[0].end < pair[1].start));
                for point in 0..80 {
                    prop_assert_eq!(ranges.holding(point).is_some(), model.contains(&point));
                }
            }
        }
    }
}
