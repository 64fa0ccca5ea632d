//! What the schedule needs to know of a unit.
#![forbid(unsafe_code)]

use crate::model::UnitId;
use crate::unit_set::{UnitSet, units_of};

/// A unit as the schedule sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnitView {
    /// Whether any of its bytes are copied when it is used. A resident unit needs no commands.
    pub streamed: bool,
    /// The other units whose ring bytes overlap its own. Symmetric.
    pub conflicts: UnitSet,
}

/// Who conflicts with whom, one row of bits a unit, so that a visit touches little memory.
#[derive(Debug, Clone)]
pub(super) struct Conflicts {
    words: usize,
    rows: Vec<u64>,
}

impl Conflicts {
    pub(super) fn new(views: &[UnitView]) -> Self {
        let words = views.len().div_ceil(64);
        let mut rows = Vec::with_capacity(words * views.len());
        for (index, view) in views.iter().enumerate() {
            rows.extend_from_slice(view.conflicts.words());
            rows.resize((index + 1) * words, 0);
        }
        Self { words, rows }
    }

    /// The units of `among` whose ring bytes overlap those of `unit`, in ascending order.
    pub(super) fn of_these<'a>(&'a self, unit: usize, among: &'a [u64]) -> impl Iterator<Item = UnitId> + 'a {
        let row = &self.rows[unit * self.words..(unit + 1) * self.words];
        units_of(row.iter().zip(among).map(|(row, among)| row & among))
    }
}
