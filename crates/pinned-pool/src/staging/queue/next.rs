//! Who does what next: submitting before reading, lines in turn.
#![forbid(unsafe_code)]

use super::Queue;
use super::types::{Flight, Line, LineId, Next, Place, Step, Turn};
#[cfg(test)]
use super::{Mutant, types::Job};
use crate::error::HostError;

impl<J: Clone> Queue<J> {
    /// What a thread does next. Submitting comes first: it takes no time and lets the device go on.
    pub(in crate::staging) fn next(&mut self) -> Next<J> {
        if self.stopping {
            return Next::Stop;
        }
        if let Some(step) = self.next_step() {
            return step;
        }
        if let Some(hopeless) = self.next_hopeless() {
            return hopeless;
        }
        let (fill, starved) = self.next_fill();
        if let Some(fill) = fill {
            return fill;
        }
        if starved && !self.polling {
            let oldest = |line: &Line<J>| line.flying.front().copied();
            let oldest = self.lines.values().filter_map(oldest);
            let slots: Vec<Flight> = oldest.chain(self.orphans.iter().copied()).collect();
            if !slots.is_empty() {
                self.polling = true;
                return Next::Poll(slots);
            }
        }
        Next::Idle
    }

    fn next_step(&mut self) -> Option<Next<J>> {
        #[cfg(test)]
        let mutant = self.mutant;
        for (&id, line) in &mut self.lines {
            #[cfg(test)]
            if mutant == Some(Mutant::SubmitTogether) {
                line.submitting = false;
            }
            if line.submitting || line.broken.is_some() {
                continue;
            }
            let Some(front) = line.jobs.front_mut() else { continue };
            let step = front.step();
            #[cfg(test)]
            let step = mutated(mutant, front, step);
            let Some(step) = step else { continue };
            if let Step::Copy { .. } = step {
                front.ready.pop_front();
                front.submitted += 1;
            }
            line.submitting = true;
            line.busy += 1;
            let turn = Turn { line: id, job: front.number, step };
            return Some(Next::Submit(turn, front.work.clone()));
        }
        None
    }

    /// A job that will never be submitted: it wants a slot where none is left for ever, or its stream lacks a wait.
    fn next_hopeless(&mut self) -> Option<Next<J>> {
        let lost = if self.slots == 0 { self.lost.clone().or(Some(HostError::StagingStopped)) } else { None };
        let hopeless = |(&id, line): (&LineId, &Line<J>)| {
            let broken = line.broken.clone().and_then(|why| Some((id, line.jobs.front()?.number, why)));
            broken.or_else(|| Some((id, line.jobs.get(line.wants()?)?.number, lost.clone()?)))
        };
        let (id, number, why) = self.lines.iter().find_map(hopeless)?;
        let line = self.lines.get_mut(&id)?;
        line.busy += 1;
        if let Some(job) = self.fail(id, number, why) {
            return Some(Next::Drop(id, job));
        }
        // It has still to begin, which is what comes next.
        self.lines.get_mut(&id)?.busy -= 1;
        self.next_step()
    }

    /// The next chunk to fill, lines in turn; and whether some line wants a slot and has to wait for one.
    fn next_fill(&mut self) -> (Option<Next<J>>, bool) {
        let active = self.lines.values().filter(|line| !line.jobs.is_empty()).count();
        let share = (self.slots / active.max(1)).max(1);
        let mut starved = false;
        let after = self.lines.range(self.turn + 1..).map(|(&id, _)| id);
        let before = self.lines.range(..=self.turn).map(|(&id, _)| id);
        let mut chosen = None;
        for id in after.chain(before) {
            let Some(line) = self.lines.get(&id) else { continue };
            let Some(index) = line.wants() else { continue };
            if line.slots() >= share || self.free.is_empty() {
                starved = true;
                continue;
            }
            chosen = Some((id, index));
            break;
        }
        let Some((id, index)) = chosen else { return (None, starved) };
        let Some(line) = self.lines.get_mut(&id) else { return (None, starved) };
        let job = &mut line.jobs[index];
        let (Some(chunk), Some(slot)) = (job.unassigned(), self.free.pop()) else { return (None, starved) };
        job.ready.push_back(None);
        line.taken += 1;
        line.busy += 1;
        self.turn = id;
        let place = Place { line: id, job: job.number, chunk, slot };
        (Some(Next::Fill(place, job.work.clone())), starved)
    }
}

/// The mistakes in what comes next.
#[cfg(test)]
fn mutated<J>(mutant: Option<Mutant>, front: &Job<J>, step: Option<Step>) -> Option<Step> {
    let filled = front.ready.front().copied().flatten();
    match (mutant, filled) {
        (Some(Mutant::EndEarly), _) if front.begun && front.submitted + 1 == front.chunks => Some(Step::End),
        (Some(Mutant::SkipBegin), Some(slot)) if !front.begun => {
            Some(Step::Copy { chunk: front.submitted, slot })
        }
        (Some(Mutant::SkipBegin), None) if !front.begun && front.submitted < front.chunks => None,
        _ => step,
    }
}
