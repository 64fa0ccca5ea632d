//! How much of a model may stay on the device beside what a workload needs: pure decisions, taken before each step.
//!
//! ```text
//!   first step of a workload    the budget that was set ─ measured: what the step takes beyond what was there when it began
//!   from the second on          what is free, less what the step is going to take and a margin, is preloaded
//!   less is free than then      given back before the step begins          more: preloaded if it is worth a remap
//! ```
//!
//! A workload is what its caller tells apart, by a name: shapes of inputs, a method, a model. Where several take turns, the one
//! that needs most counts for all of them, so that nothing is moved to and fro between their steps.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};

use gpu_driver::Bytes;

/// How many steps back a workload counts.
const RECENT: usize = 4;
/// The part of what a step needs that is left free besides: blocks of a caching allocator do not fit each other exactly.
const SLACK: u64 = 16;
/// Preloading more is worth a remap from this part of the budget on.
const WORTH: u64 = 32;

/// The device's memory when a step begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Room {
    /// What the driver says is free.
    pub free: Bytes,
    /// What an allocator keeps beside that and would use again: free for the step, but not for weights.
    pub cached: Bytes,
    /// What the weights may take now.
    pub budget: Bytes,
}

/// What to do before a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decision {
    /// What the weights may take.
    pub budget: Bytes,
    /// Whether the step is to be measured.
    pub measure: bool,
    /// Whether the allocator keeps so much more than the step needs that it should give that back: ask again afterwards.
    pub trim: bool,
}

/// The preloading of one model.
#[derive(Debug, Clone, Default)]
pub struct Preload {
    least: Bytes,
    most: Bytes,
    margin: Bytes,
    /// What a step of a workload takes, by name.
    needs: BTreeMap<String, Bytes>,
    recent: VecDeque<String>,
}

impl Preload {
    /// For a model that always may take `least` and never more than `most`; `margin` is left free besides.
    pub fn new(least: Bytes, most: Bytes, margin: Bytes) -> Self {
        Self { least, most: most.max(least), margin, ..Self::default() }
    }

    /// What a workload's step needs, if it was measured.
    pub fn need(&self, workload: &str) -> Option<Bytes> {
        self.needs.get(workload).copied()
    }

    /// A workload's step needs so much: measured now, or at another time.
    pub fn learn(&mut self, workload: &str, need: Bytes) {
        self.needs.insert(workload.into(), need);
    }

    /// A step needed so much more than was known: what was preloaded had to be given back in it.
    pub fn pressed(&mut self, workload: &str, bytes: Bytes) -> Bytes {
        let need = self.needs.entry(workload.into()).or_default();
        *need = *need + bytes;
        *need
    }

    /// What to do before a step of `workload`.
    pub fn begin(&mut self, workload: &str, room: Room) -> Decision {
        let keep = |budget: Bytes| Decision { budget, measure: false, trim: false };
        if !self.needs.contains_key(workload) {
            // It may need anything: it gets all that the budget leaves.
            return Decision { measure: true, ..keep(self.least) };
        }
        if self.recent.back().is_none_or(|last| last != workload) || self.recent.len() < RECENT {
            self.recent.push_back(workload.into());
        }
        self.note(workload);
        let known = self.recent.iter().filter_map(|recent| self.needs.get(recent)).copied();
        let need = known.max().unwrap_or(Bytes::ZERO);
        let need = need + Bytes(need.0 / SLACK);
        // What is cached is used again by the step.
        let taken = (need - room.cached) + self.margin;
        let allowed = (room.free + room.budget).0.saturating_sub(taken.0);
        let budget = Bytes(allowed).clamp(self.least, self.most);
        if room.cached > need + self.margin && budget < self.most {
            return Decision { trim: true, ..keep(room.budget.max(self.least)) };
        }
        let worth = Bytes(room.budget.0 / WORTH);
        if budget > room.budget && budget - room.budget < worth && budget < self.most {
            return keep(room.budget);
        }
        keep(budget)
    }

    /// The last steps' workloads, this one included.
    fn note(&mut self, workload: &str) {
        if self.recent.len() >= RECENT {
            self.recent.push_back(workload.into());
        }
        while self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }
}
