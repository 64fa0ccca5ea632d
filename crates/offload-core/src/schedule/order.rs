//! The order in which units are expected, as learned from the step before.
//!
//! Only streamed visits matter to the prediction; all visits are kept so that a planner can see them. The prediction
//! is cyclic: after the last visit of a step comes the first of the next.
#![forbid(unsafe_code)]

use crate::model::UnitId;

/// A learned order, the place in it, and what this step has visited so far.
#[derive(Debug, Clone)]
pub(super) struct Order {
    streamed: Vec<bool>,
    /// All visits of a step.
    visits: Vec<UnitId>,
    /// The streamed ones among them.
    expected: Vec<u32>,
    /// Where each unit occurs in `expected`: `positions[first[u]..first[u + 1]]`, ascending.
    first: Vec<u32>,
    positions: Vec<u32>,
    /// The place in `expected` of the next streamed visit.
    next: usize,
    /// This step's visits so far.
    recorded: Vec<UnitId>,
    in_step: bool,
    /// Whether the caller marks steps. If not, steps are told apart by their first unit.
    marks_steps: bool,
}

impl Order {
    pub(super) fn new(streamed: Vec<bool>, visits: Vec<UnitId>) -> Self {
        let mut order = Self {
            first: vec![0; streamed.len() + 1],
            streamed,
            recorded: Vec::with_capacity(visits.len()),
            visits,
            expected: Vec::new(),
            positions: Vec::new(),
            next: 0,
            in_step: false,
            marks_steps: false,
        };
        order.index();
        order
    }

    /// All visits of a step, as learned.
    pub(super) fn visits(&self) -> &[UnitId] {
        &self.visits
    }

    /// How many streamed visits a step is expected to make.
    pub(super) fn len(&self) -> usize {
        self.expected.len()
    }

    /// The unit expected `ahead` streamed visits after the next one; `ahead` is below [`len`](Self::len).
    pub(super) fn ahead(&self, ahead: usize) -> usize {
        let place = self.next + ahead;
        let wrapped = if place >= self.expected.len() { place - self.expected.len() } else { place };
        self.expected[wrapped] as usize
    }

    /// Whether the next streamed visit is expected to be of `unit`.
    pub(super) fn expects(&self, unit: usize) -> bool {
        self.expected.get(self.next).is_some_and(|&next| next as usize == unit)
    }

    /// Steps over the next expected visit.
    pub(super) fn advance(&mut self) {
        self.next += 1;
        if self.next == self.expected.len() {
            self.next = 0;
        }
    }

    /// Goes to just after the nearest later occurrence of `unit`; stays if there is none.
    pub(super) fn resynchronize(&mut self, unit: usize) {
        let places = &self.positions[self.first[unit] as usize..self.first[unit + 1] as usize];
        let later = places.partition_point(|&place| (place as usize) < self.next);
        if let Some(&place) = places.get(later).or(places.first()) {
            self.next = place as usize;
            self.advance();
        }
    }

    /// A step begins.
    pub(super) fn begin_step(&mut self) {
        self.recorded.clear();
        self.in_step = true;
        self.marks_steps = true;
        self.next = 0;
    }

    /// A step ends: what it visited is what the next one is expected to visit.
    pub(super) fn end_step(&mut self) {
        self.in_step = false;
        self.learn();
        self.next = 0;
    }

    /// Forgets this step's visits.
    pub(super) fn forget(&mut self) {
        self.recorded.clear();
        self.in_step = false;
        self.next = 0;
    }

    /// Whether a visit of `unit` begins a step that nobody marked: the first unit comes again, and not just twice.
    pub(super) fn starts_over(&self, unit: UnitId) -> bool {
        !self.marks_steps
            && self.recorded.first() == Some(&unit)
            && self.recorded.len() * 2 >= self.visits.len()
    }

    /// The same visits and the same place among them, where other units stream.
    pub(super) fn continued(&self, streamed: Vec<bool>) -> Self {
        let mut order = Self { first: vec![0; streamed.len() + 1], streamed, next: 0, ..self.clone() };
        order.index();
        let streams = |unit: &&UnitId| order.streamed[unit.0 as usize];
        if order.visits.starts_with(&order.recorded) {
            let passed = order.recorded.iter().filter(streams).count();
            order.next = if passed < order.expected.len() { passed } else { 0 };
        } else if let Some(&last) = order.recorded.iter().rev().find(streams) {
            order.resynchronize(last.0 as usize);
        }
        order
    }

    /// Notes a visit.
    pub(super) fn record(&mut self, unit: UnitId) {
        if self.marks_steps && !self.in_step {
            return; // A visit between marked steps says nothing about the next one.
        }
        if self.starts_over(unit) {
            self.learn();
        } else if !self.in_step && self.recorded.len() >= 4 * (self.visits.len() + self.streamed.len()) {
            self.recorded.clear(); // No period was found in all this.
        }
        self.recorded.push(unit);
    }

    /// Takes this step's visits as the order, if they differ from it.
    fn learn(&mut self) {
        if !self.recorded.is_empty() && self.recorded != self.visits {
            std::mem::swap(&mut self.recorded, &mut self.visits);
            self.index();
        }
        self.recorded.clear();
    }

    fn index(&mut self) {
        self.expected.clear();
        self.expected
            .extend(self.visits.iter().map(|unit| unit.0).filter(|&unit| self.streamed[unit as usize]));
        self.first.fill(0);
        for &unit in &self.expected {
            self.first[unit as usize + 1] += 1;
        }
        for unit in 1..self.first.len() {
            self.first[unit] += self.first[unit - 1];
        }
        self.positions.clear();
        self.positions.resize(self.expected.len(), 0);
        // Filling from the back leaves every list ascending and `first` where it was.
        let mut end: Vec<u32> = self.first[1..].to_vec();
        for (place, &unit) in self.expected.iter().enumerate().rev() {
            end[unit as usize] -= 1;
            self.positions[end[unit as usize] as usize] = place as u32;
        }
        self.next = 0;
    }
}
