//! What is resident, what streams, and where in the transit ring: decided once, before a step runs.
//!
//! ```text
//! line   | base | unit 0: own own|~~~~~~ streamed ~~~~~~| unit 1: own|~~~~~~~~| unit 2 …
//! ring                           |0    1    2    3    4 |            |5    0  |  page of each streamed granule
//! ```
//!
//! Each unit keeps the granules at its start (its resident head) and streams the rest in one contiguous copy.
//! Streamed granules are numbered in execution order and share the ring's pages in turn, so that a unit's place in the
//! ring is a cyclic interval of bytes (where turns are short of the ring's end, the interval skips its last pages). Two units whose intervals overlap are never present together.
#![forbid(unsafe_code)]

mod build;
mod check;
mod conflicts;
mod error;
mod estimate;
mod ground;
mod ring;
mod search;
mod segments;
mod spread;
#[cfg(test)]
mod tests;

use std::ops::Range;

use gpu_driver::Bytes;

pub use error::PlanError;
pub use segments::SegmentedPlan;

use crate::layout::Layout;
use crate::model::{BlockId, UnitId};
use crate::unit_set::UnitSet;
use crate::units::{UnitDesc, Units};

/// What lies behind a granule of the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backing {
    /// A page of its own: resident.
    Own,
    /// The ring page of this number, shared with every other granule of the same number.
    Ring(u32),
}

/// A unit's part of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitPlan {
    /// The block it belongs to.
    pub block: BlockId,
    /// Its name, for reports and errors.
    pub name: String,
    /// Its bytes on the line.
    pub span: Range<u64>,
    /// The part of them that is copied before each use; empty if the unit is resident.
    pub streamed: Range<u64>,
    /// Where the first streamed byte lies, in bytes from the ring's start; zero if the unit is resident.
    pub ring_start: u64,
    /// The other units whose streamed bytes share ring bytes with this one's. A copy into this unit must wait
    /// for the last use of each, and ends their presence.
    pub conflicts: UnitSet,
}

impl UnitPlan {
    /// How many bytes are copied before a use.
    pub fn streamed_bytes(&self) -> Bytes {
        Bytes(self.streamed.end - self.streamed.start)
    }

    /// Whether nothing of it is ever copied after loading.
    pub fn is_resident(&self) -> bool {
        self.streamed.is_empty()
    }
}

/// What a plan is asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct PlanRequest {
    /// The most physical memory the weights may take, base and ring included; `None` keeps everything resident.
    pub budget: Option<Bytes>,
    /// The most units copied ahead of the one computed; `None` lets the ring decide.
    pub look_ahead: Option<u32>,
    /// The seconds of compute of each visit of the order, if known; residents are then placed where copies cannot hide.
    pub compute: Option<Vec<f64>>,
    /// The rate of copies from pinned host memory.
    pub link_bytes_per_second: f64,
    /// The backing of a plan of the same layout, outside of which nothing becomes resident where the budget allows that:
    /// what replaces that plan is then made without copying a resident byte. A plan for a smaller budget asks for it.
    pub within: Option<Vec<Backing>>,
}

/// Everything resident, over a link of 25 GB/s, the middle of what `PCIe` 4 and 5 give.
impl Default for PlanRequest {
    fn default() -> Self {
        Self { budget: None, look_ahead: None, compute: None, link_bytes_per_second: 25e9, within: None }
    }
}

/// Something about a plan that a user may want to know.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum PlanNote {
    /// The whole model fits in the budget: nothing is ever copied in a step.
    EverythingResident,
    /// The ring holds one unit at a time somewhere in the order: that unit's copy cannot overlap the compute before it.
    OneSlot {
        /// The name of a unit that has to wait for its predecessor.
        unit: String,
        /// The smallest budget known to avoid it; `None` if the one given would do, and copying less is faster than
        /// overlapping.
        two_slots: Option<Bytes>,
    },
    /// Granules in which units meet that do not follow one another in the order are kept resident.
    BoundariesResident {
        /// How many.
        granules: u32,
    },
    /// The ring follows the address order although the step does not: the budget could not hold the boundaries between
    /// units that do not follow one another.
    AddressOrder,
    /// Fewer units can be copied ahead than were asked for.
    LookAheadReduced {
        /// What was asked for.
        asked: u32,
        /// What the ring holds.
        possible: u32,
    },
}

/// Which bytes are resident, which ring pages the others share, and in what order they are copied.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The piece of physical memory everything is backed in.
    pub granule: Bytes,
    /// What lies behind each granule of the line, the alias behind its end not counted.
    pub backing: Vec<Backing>,
    /// How many pages the transit ring has.
    pub ring_granules: u32,
    /// How many granules are backed by pages of their own, the base region's included.
    pub own_granules: u32,
    /// The granules of the base region, which come first.
    pub base_granules: u32,
    /// The units, by [`UnitId`].
    pub units: Vec<UnitPlan>,
    /// The expected visits of one step.
    pub order: Vec<UnitId>,
    /// The most units copied ahead of the one computed.
    pub look_ahead: u32,
    /// What a user may want to know.
    pub notes: Vec<PlanNote>,
}

impl Plan {
    /// Decides what is resident and where the rest streams.
    ///
    /// # Errors
    /// A budget below the base and one largest unit, naming the minimum; an order that names a unit there is not;
    /// compute times that do not match the order; a link rate that is none.
    pub fn new(layout: &Layout, units: &Units, request: &PlanRequest) -> Result<Self, PlanError> {
        let plan = build::build(layout, units, request)?;
        if cfg!(debug_assertions) {
            plan.check(layout)?;
        }
        Ok(plan)
    }

    /// Refuses a budget in which no plan of these units fits.
    ///
    /// # Errors
    /// [`PlanError::BudgetTooSmall`], which names the smallest that works.
    pub fn check_budget(layout: &Layout, units: &Units, budget: Bytes) -> Result<(), PlanError> {
        build::check_budget(layout, units, budget)
    }

    /// The units this plan is of, in the order it expects.
    pub fn described_units(&self) -> Units {
        let unit = |unit: &UnitPlan| UnitDesc {
            block: unit.block,
            span: unit.span.clone(),
            name: unit.name.clone(),
        };
        Units { units: self.units.iter().map(unit).collect(), order: self.order.clone() }
    }

    /// The physical memory of this plan: pages of their own and the ring.
    pub fn physical_bytes(&self) -> Bytes {
        Bytes(u64::from(self.own_granules + self.ring_granules) * self.granule.0)
    }

    /// The bytes of the ring.
    pub fn ring_bytes(&self) -> Bytes {
        Bytes(u64::from(self.ring_granules) * self.granule.0)
    }

    /// The bytes copied if each visit of the order copies its unit's streamed part. A visit that follows one of the
    /// same unit before its bytes are overwritten copies less.
    pub fn streamed_bytes_per_step(&self) -> Bytes {
        self.order.iter().filter_map(|unit| self.unit(*unit)).map(UnitPlan::streamed_bytes).sum()
    }

    /// A unit, if there is one of this number.
    pub fn unit(&self, unit: UnitId) -> Option<&UnitPlan> {
        self.units.get(unit.0 as usize)
    }
}
