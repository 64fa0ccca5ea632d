//! The state machine: which units are present, open, held or expected, and what to enqueue next.
#![forbid(unsafe_code)]

use super::command::Command;
use super::error::ScheduleError;
use super::order::Order;
use super::view::{Conflicts, UnitView};
use crate::model::UnitId;
use crate::plan::Plan;
use crate::unit_set::set;

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unit {
    pub(super) streamed: bool,
    /// Its copy was issued and nothing that overlaps it was issued since.
    pub(super) present: bool,
    /// Visits and holds not yet over.
    pub(super) open: u32,
    /// How many of `open` are holds.
    pub(super) held: u32,
    /// How often it occurs in the window of visits already covered by copies.
    pub(super) pending: u32,
    /// When its last use was recorded, counted in records; zero is never.
    pub(super) last_use: u64,
}

/// The schedule of one plan.
#[derive(Debug, Clone)]
pub struct Schedule {
    pub(super) units: Vec<Unit>,
    pub(super) conflicts: Conflicts,
    pub(super) order: Order,
    pub(super) look_ahead: usize,
    /// The units that are present, as bits by number.
    pub(super) present: Vec<u64>,
    /// Kept for its memory.
    pub(super) evicted: Vec<u32>,
    /// How many expected visits from the next one on are present.
    pub(super) covered: usize,
    /// Last uses recorded so far, and up to which of them the copy stream has waited.
    pub(super) records: u64,
    pub(super) waited: u64,
    fetched_on_demand: u64,
    pub(super) announce: bool,
}

impl Schedule {
    /// A schedule for units, expected in `order`, that copies at most `look_ahead` streamed visits ahead of the one
    /// being computed. Zero copies a unit when it is entered.
    pub fn new(views: &[UnitView], order: &[UnitId], look_ahead: u32) -> Result<Self, ScheduleError> {
        let count = views.len() as u32;
        let named = order.iter().copied().chain(views.iter().filter_map(|view| view.conflicts.last()));
        if let Some(unit) = named.into_iter().find(|unit| unit.0 >= count) {
            return Err(ScheduleError::UnknownUnit { unit, units: count });
        }
        let units = views.iter().map(|view| Unit { streamed: view.streamed, ..Unit::default() }).collect();
        let streamed = views.iter().map(|view| view.streamed).collect();
        Ok(Self {
            units,
            conflicts: Conflicts::new(views),
            order: Order::new(streamed, order.to_vec()),
            look_ahead: look_ahead as usize,
            present: vec![0; views.len().div_ceil(64)],
            evicted: Vec::with_capacity(views.len()),
            covered: 0,
            records: 0,
            waited: 0,
            fetched_on_demand: 0,
            announce: false,
        })
    }

    /// The schedule of a plan, expecting the plan's order.
    pub fn for_plan(plan: &Plan) -> Result<Self, ScheduleError> {
        let view = |unit: &crate::plan::UnitPlan| UnitView {
            streamed: !unit.streamed.is_empty(),
            conflicts: unit.conflicts.clone(),
        };
        Self::new(&plan.units.iter().map(view).collect::<Vec<_>>(), &plan.order, plan.look_ahead)
    }

    /// Asks for [`Command::Evict`] before the bytes of a present unit are overwritten.
    pub fn announce_evictions(&mut self, on: bool) {
        self.announce = on;
    }

    /// The visits of a step as expected now, resident units included.
    pub fn order(&self) -> &[UnitId] {
        self.order.visits()
    }

    /// How many copies were issued because a unit was entered before any copy of it had been.
    pub fn fetched_on_demand(&self) -> u64 {
        self.fetched_on_demand
    }

    /// Whether the unit's bytes are in the ring, or will be once issued copies have run. A resident unit always is.
    pub fn is_present(&self, unit: UnitId) -> bool {
        self.units.get(unit.0 as usize).is_some_and(|state| state.present || !state.streamed)
    }

    /// Units entered or held and not yet left.
    pub fn open_units(&self) -> impl Iterator<Item = UnitId> + '_ {
        self.having(|unit| unit.open > 0)
    }

    /// Units held and not yet released.
    pub fn held_units(&self) -> impl Iterator<Item = UnitId> + '_ {
        self.having(|unit| unit.held > 0)
    }

    fn having(&self, test: fn(&Unit) -> bool) -> impl Iterator<Item = UnitId> + '_ {
        (0..).zip(&self.units).filter(move |(_, unit)| test(unit)).map(|(id, _)| UnitId(id))
    }

    /// A step begins: its first units are copied ahead. Marking steps is optional.
    pub fn begin_step(&mut self, commands: &mut Vec<Command>) {
        self.uncover();
        self.order.begin_step();
        self.cover(commands);
    }

    /// A step ends: its visits become the expected order, and the next step's first units are copied ahead.
    pub fn end_step(&mut self, commands: &mut Vec<Command>) {
        // The window is named by the old order, so it goes before the order does.
        self.uncover();
        self.order.end_step();
        self.cover(commands);
    }

    /// The unit's turn begins. After the commands, work on the compute stream may use its bytes.
    pub fn enter(&mut self, unit: UnitId, commands: &mut Vec<Command>) -> Result<(), ScheduleError> {
        let id = self.checked(unit)?;
        self.check_room(id)?;
        if self.units[id].open == 0 {
            self.follow(unit);
        }
        self.open(id, commands);
        Ok(())
    }

    /// The unit's turn ends. Its bytes may be overwritten once the work enqueued so far has run.
    pub fn leave(&mut self, unit: UnitId, commands: &mut Vec<Command>) -> Result<(), ScheduleError> {
        let id = self.checked(unit)?;
        if self.units[id].open == self.units[id].held {
            return Err(ScheduleError::NotOpen { unit });
        }
        self.close(id, commands);
        Ok(())
    }

    /// Makes the unit present outside its turn, until released. Says nothing about the order.
    pub fn hold(&mut self, unit: UnitId, commands: &mut Vec<Command>) -> Result<(), ScheduleError> {
        let id = self.checked(unit)?;
        self.check_room(id)?;
        self.uncover();
        self.units[id].held += 1;
        self.open(id, commands);
        Ok(())
    }

    /// Ends a [`hold`](Self::hold).
    pub fn release(&mut self, unit: UnitId, commands: &mut Vec<Command>) -> Result<(), ScheduleError> {
        let id = self.checked(unit)?;
        if self.units[id].held == 0 {
            return Err(ScheduleError::NotHeld { unit });
        }
        self.units[id].held -= 1;
        self.close(id, commands);
        Ok(())
    }

    /// Starts over after an error: no visit is open and nothing is present; holds remain and want
    /// [`refill`](Self::refill). The caller has waited for all copies and all uses.
    pub fn reset(&mut self) {
        self.uncover();
        self.order.forget();
        for unit in &mut self.units {
            unit.present = false;
            unit.open = unit.held;
        }
        self.present.fill(0);
        self.waited = self.records;
    }

    /// Goes on where `before` is, which is of a plan of the same units: what is open or held stays so and wants
    /// [`refill`](Self::refill), nothing is present. The caller has waited for all copies and all uses.
    pub fn resume(&mut self, before: &Self) {
        self.order = before.order.continued(self.units.iter().map(|unit| unit.streamed).collect());
        for (unit, before) in self.units.iter_mut().zip(&before.units) {
            (unit.open, unit.held) = (before.open, before.held);
        }
        self.announce = before.announce;
    }

    /// What `before`, of the same units, holds stays held, and wants [`refill`](Self::refill).
    pub fn keep_holds(&mut self, before: &Self) {
        for (unit, before) in self.units.iter_mut().zip(&before.units) {
            (unit.open, unit.held) = (before.held, before.held);
        }
    }

    /// Two units in use that could not be present together; none if [`refill`](Self::refill) can make all of them so.
    pub fn crowded(&self) -> Option<(UnitId, UnitId)> {
        let wanted = |unit: &UnitId| self.units[unit.0 as usize].streamed;
        let open: Vec<UnitId> = self.open_units().filter(wanted).collect();
        let mut bits = vec![0; self.present.len()];
        for &unit in &open {
            if let Some(other) = self.conflicts.of_these(unit.0 as usize, &bits).next() {
                return Some((unit, other));
            }
            set(&mut bits, unit);
        }
        None
    }

    /// Copies units that are in use again after a [`reset`](Self::reset) or [`resume`](Self::resume).
    pub fn refill(&mut self, commands: &mut Vec<Command>) {
        for id in 0..self.units.len() {
            if self.units[id].open > 0 && self.units[id].streamed && !self.units[id].present {
                self.issue(id, commands);
                commands.push(Command::WaitCopied(UnitId(id as u32)));
            }
        }
    }

    fn checked(&self, unit: UnitId) -> Result<usize, ScheduleError> {
        let units = self.units.len() as u32;
        if unit.0 < units { Ok(unit.0 as usize) } else { Err(ScheduleError::UnknownUnit { unit, units }) }
    }

    /// Refuses if the unit would have to be copied over one that is in use.
    fn check_room(&self, id: usize) -> Result<(), ScheduleError> {
        if !self.units[id].streamed || self.units[id].present {
            return Ok(());
        }
        match self.overwritten_by(id).find(|&other| self.units[other as usize].open > 0) {
            Some(open) => Err(ScheduleError::Conflict { unit: UnitId(id as u32), open: UnitId(open) }),
            None => Ok(()),
        }
    }

    /// Moves the place in the order past a visit of `unit`.
    fn follow(&mut self, unit: UnitId) {
        let id = unit.0 as usize;
        if self.order.starts_over(unit) {
            self.uncover(); // The order may be about to change.
        }
        self.order.record(unit);
        if !self.units[id].streamed {
            return;
        }
        if self.order.expects(id) {
            if self.covered > 0 {
                self.covered -= 1;
                self.units[id].pending -= 1;
            }
            self.order.advance();
        } else {
            self.uncover();
            self.order.resynchronize(id);
        }
    }

    fn open(&mut self, id: usize, commands: &mut Vec<Command>) {
        self.units[id].open += 1;
        if !self.units[id].streamed {
            return;
        }
        if !self.units[id].present {
            // Every unit this overwrites is closed (checked), and none of them is covered: the window is empty.
            self.fetched_on_demand += 1;
            self.issue(id, commands);
        }
        commands.push(Command::WaitCopied(UnitId(id as u32)));
        self.cover(commands);
    }

    fn close(&mut self, id: usize, commands: &mut Vec<Command>) {
        self.units[id].open -= 1;
        if self.units[id].open > 0 || !self.units[id].streamed {
            return;
        }
        self.records += 1;
        self.units[id].last_use = self.records;
        commands.push(Command::RecordLastUse(UnitId(id as u32)));
        self.cover(commands);
    }
}
