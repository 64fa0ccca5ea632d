//! What every plan of the same units has in common: which granules a unit's head can take, and in which sequence the
//! ring is filled.

use std::ops::Range;

use super::Backing;
use crate::layout::Layout;
use crate::model::UnitId;
use crate::units::Units;

/// A unit as the planner sees it.
#[derive(Debug, Clone)]
pub(super) struct GroundUnit {
    /// Its bytes on the line.
    pub(super) span: Range<u64>,
    /// The granule that holds its first byte, the first its resident head takes.
    pub(super) first: u32,
    /// How many granules its head can take. A granule that several units share belongs to the last of them.
    pub(super) capacity: u32,
    /// How many it may take: fewer where nothing new is to become resident.
    pub(super) most: u32,
    /// How many it must take, because its first granule is shared with a unit that does not precede it in the sequence.
    pub(super) forced: u32,
}

impl GroundUnit {
    pub(super) fn bytes(&self) -> u64 {
        self.span.end - self.span.start
    }
}

/// The facts that a plan is built on.
#[derive(Debug, Clone)]
pub(super) struct Ground {
    /// Bytes of a granule.
    pub(super) granule: u64,
    /// Granules of the line.
    pub(super) granules: u32,
    /// Granules of the base region.
    pub(super) base: u32,
    /// By unit.
    pub(super) units: Vec<GroundUnit>,
    /// The units in the sequence in which they take ring pages.
    pub(super) sequence: Vec<UnitId>,
}

/// In which sequence units take ring pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sequence {
    /// As the step visits them first; units it does not visit come last.
    Visits,
    /// As they lie on the line.
    Address,
}

impl Ground {
    pub(super) fn new(layout: &Layout, units: &Units, sequence: Sequence) -> Self {
        let granule = layout.granule().0;
        let sequence = match sequence {
            Sequence::Visits => by_first_visit(units),
            Sequence::Address => (0..units.units.len() as u32).map(UnitId).collect(),
        };
        let mut ground = Self {
            granule,
            granules: layout.granules(),
            base: layout.base_granules(),
            units: Vec::with_capacity(units.units.len()),
            sequence,
        };
        for unit in &units.units {
            let first = (unit.span.start / granule) as u32;
            let tower_ends = layout.towers().iter().any(|tower| tower.end == unit.span.end);
            let end =
                if tower_ends { unit.span.end.div_ceil(granule) } else { unit.span.end / granule } as u32;
            let capacity = if unit.span.is_empty() { 0 } else { end.saturating_sub(first) };
            ground.units.push(GroundUnit {
                span: unit.span.clone(),
                first,
                capacity,
                most: capacity,
                forced: 0,
            });
        }
        ground.force_boundaries();
        ground
    }

    /// The same, where heads take only what is resident in `backing`.
    pub(super) fn within(mut self, backing: &[Backing]) -> Self {
        for unit in &mut self.units {
            let head = &backing[unit.first as usize..][..unit.capacity as usize];
            unit.most = head.iter().take_while(|backing| **backing == Backing::Own).count() as u32;
        }
        self
    }

    /// Granules outside the base region.
    pub(super) fn line_granules(&self) -> u32 {
        self.granules - self.base
    }

    /// How many granules must be resident besides the base.
    pub(super) fn forced(&self) -> u32 {
        self.units.iter().map(|unit| unit.forced).sum()
    }

    /// A granule in which units meet can stream only if they follow one another in the sequence: its ring page is
    /// then the last of one and the first of the next.
    fn force_boundaries(&mut self) {
        let mut place = vec![0_u32; self.units.len()];
        let occupied = self.sequence.iter().filter(|unit| self.units[unit.0 as usize].bytes() > 0);
        for (position, unit) in occupied.enumerate() {
            place[unit.0 as usize] = position as u32;
        }
        let mut previous: Option<usize> = None;
        let mut broken = false;
        for index in 0..self.units.len() {
            if self.units[index].bytes() == 0 {
                continue;
            }
            let first = self.units[index].first;
            let meets = previous.filter(|&p| self.units[p].span.end > u64::from(first) * self.granule);
            // A granule shared by more than two units is broken if any of its boundaries is.
            broken = match meets {
                Some(p) => place[p] + 1 != place[index] || (broken && self.units[p].first == first),
                None => false,
            };
            if broken && self.units[index].capacity > 0 {
                self.units[index].forced = 1;
            }
            previous = Some(index);
        }
    }
}

fn by_first_visit(units: &Units) -> Vec<UnitId> {
    let mut seen = vec![false; units.units.len()];
    let mut sequence = Vec::with_capacity(seen.len());
    let all = (0..seen.len() as u32).map(UnitId);
    for unit in units.order.iter().copied().chain(all) {
        let seen = &mut seen[unit.0 as usize];
        if !std::mem::replace(seen, true) {
            sequence.push(unit);
        }
    }
    sequence
}
