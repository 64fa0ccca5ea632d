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
    /// What they may take in any case.
    pub least: Bytes,
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
    most: Bytes,
    margin: Bytes,
    /// What a step of a workload takes, by name.
    needs: BTreeMap<String, Bytes>,
    recent: VecDeque<String>,
    asks_again: bool,
    /// What the last decision left for its step.
    left: Bytes,
}

impl Preload {
    /// For a model that never takes more than `most`; `margin` is left free besides.
    pub fn new(most: Bytes, margin: Bytes) -> Self {
        Self { most, margin, ..Self::default() }
    }

    /// What a workload's step needs, if it was measured.
    pub fn need(&self, workload: &str) -> Option<Bytes> {
        self.needs.get(workload).copied()
    }

    /// A workload's step needs so much: measured now, or at another time.
    pub fn learn(&mut self, workload: &str, need: Bytes) {
        self.needs.insert(workload.into(), need);
    }

    /// The step that began last needs so much more than it was left: what was preloaded had to be given back in it. Gives what it
    /// needs, as far as that is known.
    pub fn pressed(&mut self, workload: &str, bytes: Bytes) -> Bytes {
        self.left = self.left + bytes;
        let need = self.needs.entry(workload.into()).or_default();
        *need = (*need + bytes).max(self.left);
        *need
    }

    /// What to do before a step of `workload`.
    pub fn begin(&mut self, workload: &str, room: Room) -> Decision {
        let decision = self.decide(workload, room);
        self.left = room.free + room.cached + room.budget - decision.budget;
        decision
    }

    fn decide(&mut self, workload: &str, room: Room) -> Decision {
        let keep = |budget: Bytes| Decision { budget, measure: false, trim: false };
        if !self.needs.contains_key(workload) {
            // It may need anything: it gets all that the budget leaves.
            return Decision { measure: true, ..keep(room.least) };
        }
        self.note(workload);
        let known = self.recent.iter().filter_map(|recent| self.needs.get(recent)).copied();
        let need = known.max().unwrap_or(Bytes::ZERO);
        let need = need + Bytes(need.0 / SLACK);
        // What is cached is used again by the step.
        let taken = (need - room.cached) + self.margin;
        let allowed = (room.free + room.budget).0.saturating_sub(taken.0);
        let budget = Bytes(allowed).min(self.most).max(room.least);
        if room.cached > need + self.margin && budget < self.most {
            self.asks_again = true;
            return Decision { trim: true, ..keep(room.budget.max(room.least)) };
        }
        let worth = Bytes(room.budget.0 / WORTH);
        if budget > room.budget && budget - room.budget < worth && budget < self.most {
            return keep(room.budget);
        }
        keep(budget)
    }

    /// Notes the workload of a step; that of one which is asked about again is noted already.
    fn note(&mut self, workload: &str) {
        if std::mem::take(&mut self.asks_again) {
            return;
        }
        self.recent.push_back(workload.into());
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn mib(count: u64) -> Bytes {
        Bytes(count * MIB)
    }

    /// A device of 1000 MiB on which a model holds its budget and an allocator what it holds and what it keeps.
    struct Device {
        budget: Bytes,
        held: Bytes,
        cached: Bytes,
    }

    impl Device {
        fn room(&self) -> Room {
            let free = mib(1000) - self.budget - self.held - self.cached;
            Room { free, cached: self.cached, budget: self.budget, least: mib(100) }
        }

        /// A step that needs so much, which must fit beside what was decided.
        fn step(&mut self, preload: &mut Preload, workload: &str, need: Bytes) -> Decision {
            let mut decision = preload.begin(workload, self.room());
            if decision.trim {
                self.cached = Bytes::ZERO;
                decision = preload.begin(workload, self.room());
                assert!(!decision.trim, "asked once");
            }
            self.budget = decision.budget;
            self.cached = self.cached.max(need);
            assert!(self.budget + self.held + self.cached <= mib(1000), "{workload} runs out of memory");
            if decision.measure {
                preload.learn(workload, need);
            }
            decision
        }
    }

    fn setting() -> (Preload, Device) {
        (Preload::new(mib(800), mib(50)), Device { budget: mib(100), held: mib(20), cached: Bytes::ZERO })
    }

    #[test]
    fn the_second_step_fills_what_the_first_one_left() {
        let (mut preload, mut device) = setting();
        let first = device.step(&mut preload, "a", mib(320));
        assert_eq!((first.budget, first.measure), (mib(100), true));
        let second = device.step(&mut preload, "a", mib(320));
        assert_eq!(
            (second.budget, second.measure),
            (mib(590), false),
            "of 1000 without 20, 320, a slack of 20 and a margin of 50"
        );
        assert_eq!(device.step(&mut preload, "a", mib(320)).budget, mib(590));
    }

    #[test]
    fn never_less_than_the_budget_nor_more_than_allowed() {
        let (mut preload, mut device) = setting();
        device.step(&mut preload, "small", mib(1));
        assert_eq!(device.step(&mut preload, "small", mib(1)).budget, mib(800));
        let (mut preload, mut device) = setting();
        device.step(&mut preload, "large", mib(860));
        assert_eq!(device.step(&mut preload, "large", mib(860)).budget, mib(100));
    }

    #[test]
    fn an_unknown_workload_begins_with_the_budget_alone_and_the_larger_of_two_counts() {
        let (mut preload, mut device) = setting();
        for _ in 0..3 {
            device.step(&mut preload, "small", mib(64));
        }
        let small = device.budget;
        assert_eq!(device.step(&mut preload, "large", mib(400)).budget, mib(100));
        let large = device.step(&mut preload, "large", mib(400)).budget;
        assert!(large < small && large > mib(100), "{large}");
        // In turns nothing moves.
        for workload in ["small", "large", "small", "large"] {
            let need = if workload == "small" { mib(64) } else { mib(400) };
            assert_eq!(device.step(&mut preload, workload, need).budget, large, "{workload}");
        }
        // Alone again, the small one gets its room back, once what the allocator kept for the other is given back.
        for _ in 0..=RECENT {
            device.step(&mut preload, "small", mib(64));
        }
        assert_eq!(device.budget, small);
    }

    #[test]
    fn what_others_take_is_given_back_before_the_step_and_little_is_not_worth_a_remap() {
        let (mut preload, mut device) = setting();
        device.step(&mut preload, "a", mib(320));
        let full = device.step(&mut preload, "a", mib(320)).budget;
        device.held = mib(220);
        let room = Room { free: Bytes::ZERO, cached: mib(320), budget: full, least: mib(100) };
        assert!(preload.begin("a", room).budget < full, "nothing is free any more");
        device.budget = full - mib(200);
        assert_eq!(device.step(&mut preload, "a", mib(320)).budget, full - mib(200));
        device.held = mib(215);
        assert_eq!(device.step(&mut preload, "a", mib(320)).budget, full - mib(200));
        device.held = mib(20);
        assert_eq!(device.step(&mut preload, "a", mib(320)).budget, full);
    }

    #[test]
    fn pressure_in_a_step_counts_from_then_on() {
        let (mut preload, mut device) = setting();
        device.step(&mut preload, "a", mib(320));
        let full = device.step(&mut preload, "a", mib(320)).budget;
        // 390 were left for it: 320 cached, 20 of slack, 50 of margin.
        assert_eq!(preload.pressed("a", mib(64)), mib(454));
        device.budget = full - mib(64);
        assert!(device.step(&mut preload, "a", mib(454)).budget <= full - mib(64));
        let mut other = Preload::new(mib(800), mib(50));
        other.learn("a", preload.need("a").unwrap_or_default());
        device.cached = Bytes::ZERO;
        assert!(!other.begin("a", device.room()).measure, "what was measured elsewhere counts");
    }
}
