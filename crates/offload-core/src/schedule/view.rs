//! What the schedule needs to know of a unit.
#![forbid(unsafe_code)]

use crate::model::UnitId;

/// A unit as the schedule sees it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnitView {
    /// Whether any of its bytes are copied when it is used. A resident unit needs no commands.
    pub streamed: bool,
    /// The other units whose ring bytes overlap its own. Symmetric.
    pub conflicts: Vec<UnitId>,
}

/// Who conflicts with whom, in one flat list so that a visit touches little memory.
#[derive(Debug, Clone)]
pub(super) struct Conflicts {
    first: Vec<u32>,
    units: Vec<u32>,
}

impl Conflicts {
    pub(super) fn new(views: &[UnitView]) -> Self {
        let mut first = Vec::with_capacity(views.len() + 1);
        let mut units = Vec::new();
        first.push(0);
        for view in views {
            let start = units.len();
            units.extend(view.conflicts.iter().map(|unit| unit.0));
            units[start..].sort_unstable();
            first.push(units.len() as u32);
        }
        Self { first, units }
    }

    /// The units whose ring bytes overlap those of `unit`, in ascending order.
    pub(super) fn of(&self, unit: usize) -> &[u32] {
        &self.units[self.first[unit] as usize..self.first[unit + 1] as usize]
    }
}
