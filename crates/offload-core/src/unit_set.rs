//! A set of units as bits: in a small ring nearly all pairs of units conflict, and lists of them would be megabytes.
#![forbid(unsafe_code)]

use std::fmt;

use crate::model::UnitId;

/// A set of units.
#[derive(Clone, PartialEq, Eq, Default)]
pub struct UnitSet {
    /// By number; the last word is not zero, so that equal sets have equal words.
    words: Vec<u64>,
}

impl UnitSet {
    /// Takes a set of which bit `n` of word `w` says whether it has unit `64 w + n`.
    pub(crate) fn of_words(words: &[u64]) -> Self {
        let used = words.iter().rposition(|&word| word != 0).map_or(0, |last| last + 1);
        Self { words: words[..used].to_vec() }
    }

    /// The same form, without zeros at the end.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    /// Whether the unit is in it.
    pub fn contains(&self, unit: UnitId) -> bool {
        self.words.get(unit.0 as usize / 64).is_some_and(|word| word >> (unit.0 % 64) & 1 == 1)
    }

    /// How many units are in it.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Its units in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = UnitId> + '_ {
        units_of(self.words.iter().copied())
    }

    /// The highest unit.
    pub fn last(&self) -> Option<UnitId> {
        let word = self.words.last()?;
        Some(UnitId((self.words.len() as u32 - 1) * 64 + word.ilog2()))
    }
}

/// The units of a set given as words, in ascending order.
pub(crate) fn units_of(words: impl Iterator<Item = u64>) -> impl Iterator<Item = UnitId> {
    let of_word = |(index, mut rest): (u32, u64)| {
        std::iter::from_fn(move || {
            (rest != 0).then(|| {
                let bit = rest.trailing_zeros();
                rest &= rest - 1;
                UnitId(index * 64 + bit)
            })
        })
    };
    (0..).zip(words).flat_map(of_word)
}

/// Puts a unit into a set given as words, which reach so far.
pub(crate) fn set(words: &mut [u64], unit: UnitId) {
    words[unit.0 as usize / 64] |= 1 << (unit.0 % 64);
}

/// Takes a unit out of a set given as words, which reach so far.
pub(crate) fn clear(words: &mut [u64], unit: UnitId) {
    words[unit.0 as usize / 64] &= !(1 << (unit.0 % 64));
}

impl FromIterator<UnitId> for UnitSet {
    fn from_iter<I: IntoIterator<Item = UnitId>>(units: I) -> Self {
        let mut words = Vec::new();
        for unit in units {
            if words.len() <= unit.0 as usize / 64 {
                words.resize(unit.0 as usize / 64 + 1, 0);
            }
            set(&mut words, unit);
        }
        Self { words }
    }
}

impl fmt::Debug for UnitSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_is_what_was_put_in() {
        let ids = [0, 63, 64, 200].map(UnitId);
        let set: UnitSet = ids.into_iter().rev().collect();
        assert_eq!(set.iter().collect::<Vec<_>>(), ids);
        assert_eq!((set.len(), set.last(), set.is_empty()), (4, Some(UnitId(200)), false));
        assert!(ids.into_iter().all(|unit| set.contains(unit)));
        assert!(![1, 65, 199, 201, 5000].into_iter().any(|unit| set.contains(UnitId(unit))));
        assert_eq!(format!("{set:?}"), "{UnitId(0), UnitId(63), UnitId(64), UnitId(200)}");
    }

    #[test]
    fn equal_sets_are_equal_whatever_they_were_made_of() {
        let set: UnitSet = [UnitId(3)].into_iter().collect();
        assert_eq!(UnitSet::of_words(&[8, 0, 0]), set);
        assert_eq!(UnitSet::of_words(&[0, 0]), UnitSet::default());
        assert_eq!((UnitSet::default().last(), UnitSet::default().is_empty()), (None, true));
    }
}
