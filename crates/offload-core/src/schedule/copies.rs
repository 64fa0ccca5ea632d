//! Which copy comes next, what it overwrites, and what it waits for.
#![forbid(unsafe_code)]

use super::command::Command;
use super::state::Schedule;
use crate::model::UnitId;
use crate::unit_set::{clear, set};

impl Schedule {
    /// Copies expected units ahead, in order, as far as the window and the ring allow.
    pub(super) fn cover(&mut self, commands: &mut Vec<Command>) {
        let window = self.look_ahead.min(self.order.len());
        while self.covered < window {
            let id = self.order.ahead(self.covered);
            if !self.units[id].present {
                let keeps = |other: u32| {
                    let other = &self.units[other as usize];
                    other.open > 0 || other.pending > 0
                };
                if self.overwritten_by(id).any(keeps) {
                    return;
                }
                self.issue(id, commands);
            }
            self.units[id].pending += 1;
            self.covered += 1;
        }
    }

    /// Forgets which expected visits are covered; [`cover`](Self::cover) finds those still present again.
    pub(super) fn uncover(&mut self) {
        for ahead in 0..self.covered {
            let id = self.order.ahead(ahead);
            self.units[id].pending = 0;
        }
        self.covered = 0;
    }

    /// The present units that a copy of this one overwrites. Only they can be in use, or have been used since the copy
    /// stream last waited: what overwrote the others has waited for them.
    pub(super) fn overwritten_by(&self, id: usize) -> impl Iterator<Item = u32> + '_ {
        self.conflicts.of_these(id, &self.present).map(|unit| unit.0)
    }

    pub(super) fn issue(&mut self, id: usize, commands: &mut Vec<Command>) {
        let mut evicted = std::mem::take(&mut self.evicted);
        evicted.clear();
        evicted.extend(self.overwritten_by(id));
        // Uses are recorded on one logical queue, so the latest one stands for all before it.
        let last_use = |&other: &u32| self.units[other as usize].last_use;
        if let Some(latest) = evicted.iter().copied().max_by_key(last_use)
            && last_use(&latest) > self.waited
        {
            self.waited = last_use(&latest);
            commands.push(Command::WaitLastUse(UnitId(latest)));
        }
        for &other in &evicted {
            self.units[other as usize].present = false;
            clear(&mut self.present, UnitId(other));
            if self.announce {
                commands.push(Command::Evict(UnitId(other)));
            }
        }
        self.evicted = evicted;
        self.units[id].present = true;
        let unit = UnitId(id as u32);
        set(&mut self.present, unit);
        commands.extend([Command::Copy(unit), Command::RecordCopied(unit)]);
    }
}
