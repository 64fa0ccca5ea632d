//! Tests of the schedule alone: what it does visit by visit, and every order in which its commands can complete.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod behaviour;
mod exhaustive;
mod model;

use super::{Command, Schedule, ScheduleError, UnitView};
use crate::model::UnitId;

/// Units on a small ring, each a cyclic run of cells. An empty run is a resident unit.
#[derive(Debug, Clone)]
struct Ring {
    cells: usize,
    /// First cell and number of cells, by unit.
    runs: Vec<(usize, usize)>,
}

impl Ring {
    /// Units of these sizes laid one after the other round the ring, as a plan lays them.
    fn dense(cells: usize, sizes: &[usize]) -> Self {
        let mut start = 0;
        let place = |&size: &usize| {
            let run = (start % cells, size);
            start += size;
            run
        };
        Self { cells, runs: sizes.iter().map(place).collect() }
    }

    fn cells_of(&self, unit: usize) -> impl Iterator<Item = usize> + '_ {
        let (start, length) = self.runs[unit];
        (start..start + length).map(|cell| cell % self.cells)
    }

    fn overlap(&self, a: usize, b: usize) -> bool {
        self.cells_of(a).any(|cell| self.cells_of(b).any(|other| other == cell))
    }

    fn views(&self) -> Vec<UnitView> {
        let units = 0..self.runs.len();
        units
            .clone()
            .map(|unit| UnitView {
                streamed: self.runs[unit].1 > 0,
                conflicts: units
                    .clone()
                    .filter(|&other| other != unit && self.overlap(unit, other))
                    .map(|other| UnitId(other as u32))
                    .collect(),
            })
            .collect()
    }

    fn schedule(&self, order: &[u32], look_ahead: u32) -> Schedule {
        let order: Vec<UnitId> = order.iter().map(|&unit| UnitId(unit)).collect();
        Schedule::new(&self.views(), &order, look_ahead).expect("the ring's units are numbered from zero")
    }
}
