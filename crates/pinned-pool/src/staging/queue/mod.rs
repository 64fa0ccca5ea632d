//! What the ring holds and what may happen next: plain state, no threads, no clock, no device.
//!
//! ```text
//!   job of a line    begin (waits) ─ chunk 0 ─ chunk 1 ─ … ─ end (record)      submitted in this order, one at a time
//!   a chunk's slot   free ─ filled by a thread ─ submitted ─ flying ─ reached: free again
//! ```
//!
//! Chunks are filled by several threads at once and in any order; they are submitted in the order of their job, and a
//! line's jobs in the order they were given.
//!
//! **Invariants.** A slot that was submitted is not given to another chunk before the device has reached the mark behind
//! it. A job's end comes after all of its chunks, its beginning before all of them. Every job that is not taken back begins,
//! also one that cannot be read: those behind it rely on its waits. A line that has work gets its share of the slots
//! whatever the others have.
#![forbid(unsafe_code)]

mod next;
mod types;

use std::collections::{BTreeMap, VecDeque};

use crate::error::{HostError, Result};

#[cfg(test)]
pub(super) use types::Mutant;
pub(super) use types::{Fate, Flight, LineId, Next, Place, Step, Turn};
use types::{Job, Line};

/// How many failures of a line are kept for those who ask: more than anybody gives jobs ahead.
const FAILURES: usize = 1000;

/// The slots of a ring, and the lines of work that share them.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Queue<J> {
    free: Vec<u32>,
    /// Slots that are not lost.
    slots: usize,
    lines: BTreeMap<LineId, Line<J>>,
    next_line: LineId,
    /// Flying slots of lines that are gone.
    orphans: Vec<Flight>,
    /// How often each slot was submitted.
    flights: Vec<u64>,
    /// The line whose chunk was given to a thread last.
    turn: LineId,
    polling: bool,
    stopping: bool,
    /// Why the last slot was lost.
    lost: Option<HostError>,
    #[cfg(test)]
    pub(super) mutant: Option<Mutant>,
}

impl<J: Clone> Queue<J> {
    pub(super) fn new(slots: u32) -> Self {
        Self {
            free: (0..slots).rev().collect(),
            slots: slots as usize,
            lines: BTreeMap::new(),
            next_line: 1,
            orphans: Vec::new(),
            flights: vec![0; slots as usize],
            turn: 0,
            polling: false,
            stopping: false,
            lost: None,
            #[cfg(test)]
            mutant: None,
        }
    }

    pub(super) fn add_line(&mut self) -> LineId {
        let id = self.next_line;
        self.next_line += 1;
        let line = Line {
            jobs: VecDeque::new(),
            next: 0,
            submitting: false,
            busy: 0,
            flying: VecDeque::new(),
            taken: 0,
            failures: BTreeMap::new(),
            broken: None,
        };
        self.lines.insert(id, line);
        id
    }

    /// Gives a job of so many chunks to a line; its number.
    pub(super) fn submit(&mut self, line: LineId, job: J, chunks: usize) -> Result<u64> {
        if self.slots == 0 && chunks > 0 {
            return Err(self.lost.clone().unwrap_or(HostError::StagingStopped));
        }
        let found = self.lines.get_mut(&line).filter(|_| !self.stopping).ok_or(HostError::StagingStopped)?;
        if let Some(broken) = &found.broken {
            return Err(broken.clone());
        }
        let number = found.next;
        found.next += 1;
        found.jobs.push_back(Job {
            number,
            work: job,
            chunks,
            begun: false,
            dead: false,
            submitted: 0,
            ready: VecDeque::new(),
        });
        Ok(number)
    }

    /// A thread has read a chunk into its slot, or could not. Gives back the job if that was the end of it; it must be
    /// dropped outside the lock, before [`done`](Self::done).
    pub(super) fn filled(&mut self, place: Place, result: Result<()>) -> Option<J> {
        let Some(line) = self.lines.get_mut(&place.line) else {
            self.free.push(place.slot);
            return None;
        };
        let found = line.jobs.iter_mut().find(|job| job.number == place.job);
        match (found, result) {
            (Some(job), Ok(())) if !job.dead => {
                if let Some(ready) = job.ready.get_mut(place.chunk - job.submitted) {
                    *ready = Some(place.slot);
                }
                None
            }
            (Some(job), Err(error)) if !job.dead => {
                line.taken -= 1;
                self.free.push(place.slot);
                self.fail(place.line, place.job, error)
            }
            // The job has failed or was cancelled meanwhile.
            (_, _) => {
                line.taken -= 1;
                self.free.push(place.slot);
                None
            }
        }
    }

    /// A thread has submitted a step, or could not. Gives back the job if that was the end of it, as
    /// [`filled`](Self::filled) does.
    pub(super) fn submitted(&mut self, turn: Turn, fate: Fate, result: Result<()>) -> Option<J> {
        let line = self.lines.get_mut(&turn.line);
        if let Step::Copy { slot, .. } = turn.step {
            let flight = Flight { slot, number: self.flights[slot as usize] };
            self.flights[slot as usize] += 1;
            match (fate, line) {
                #[cfg(test)]
                (Fate::Flying, _) if self.mutant == Some(Mutant::ReuseEarly) => self.free.push(slot),
                (Fate::Flying, Some(line)) => line.flying.push_back(flight),
                (Fate::Flying, None) => self.orphans.push(flight),
                (Fate::Unused, _) => self.free.push(slot),
                (Fate::Lost, _) => self.lose(result.as_ref().err()),
            }
        }
        let line = self.lines.get_mut(&turn.line)?;
        line.submitting = false;
        line.taken -= u32::from(matches!(turn.step, Step::Copy { .. }));
        let line = self.lines.get_mut(&turn.line)?;
        // If a read of it has failed meanwhile, another job is at the front.
        let front = line.jobs.front_mut().filter(|job| job.number == turn.job);
        match (result, turn.step) {
            (Err(error), Step::Begin) => {
                line.broken = Some(error.clone());
                front?.begun = true;
                self.fail(turn.line, turn.job, error)
            }
            (Err(error), _) => self.fail(turn.line, turn.job, error),
            (Ok(()), Step::Begin) => {
                let front = front?;
                front.begun = true;
                if front.dead { line.jobs.pop_front().map(|job| job.work) } else { None }
            }
            (Ok(()), Step::End) if front.is_some() => line.jobs.pop_front().map(|job| job.work),
            (Ok(()), _) => None,
        }
    }

    /// A thread has let go of what it did for a line.
    pub(super) fn done(&mut self, line: LineId) {
        if let Some(line) = self.lines.get_mut(&line) {
            line.busy -= 1;
        }
    }

    /// Slots were asked about. `reached` are free; `lost` are those whose mark the device cannot tell.
    pub(super) fn polled(&mut self, reached: &[Flight], lost: &[(Flight, HostError)]) {
        self.polling = false;
        self.land(reached, lost);
    }

    /// As [`polled`](Self::polled), for slots that somebody else asked about.
    pub(super) fn land(&mut self, reached: &[Flight], lost: &[(Flight, HostError)]) {
        for &flight in reached {
            if self.landed(flight) {
                self.free.push(flight.slot);
            }
        }
        for (flight, why) in lost {
            if self.landed(*flight) {
                self.lose(Some(why));
            }
        }
    }

    /// Whether this flight lasted until now. Whoever else asked may have ended it, and the slot may fly again.
    fn landed(&mut self, flight: Flight) -> bool {
        #[cfg(test)]
        let stale = self.mutant == Some(Mutant::StaleAnswer);
        #[cfg(not(test))]
        let stale = false;
        let is = |flying: &Flight| *flying == flight || stale && flying.slot == flight.slot;
        for line in self.lines.values_mut() {
            if let Some(at) = line.flying.iter().position(is) {
                line.flying.remove(at);
                return true;
            }
        }
        let orphan = self.orphans.iter().position(is);
        orphan.map(|at| self.orphans.swap_remove(at)).is_some()
    }

    /// The slots of a line that may still be read by the device, the oldest first.
    pub(super) fn flying(&self, line: LineId) -> Vec<Flight> {
        self.lines.get(&line).map_or_else(Vec::new, |line| line.flying.iter().copied().collect())
    }

    /// Takes all jobs of a line away, unless a thread is at work for it; try again when something has changed.
    pub(super) fn cancel(&mut self, id: LineId) -> Option<Vec<J>> {
        let Some(line) = self.lines.get_mut(&id) else { return Some(Vec::new()) };
        if line.submitting {
            return None;
        }
        let mut jobs = Vec::with_capacity(line.jobs.len());
        for job in line.jobs.drain(..) {
            line.failures.entry(job.number).or_insert(HostError::StagingCancelled);
            for slot in job.ready.into_iter().flatten() {
                line.taken -= 1;
                self.free.push(slot);
            }
            jobs.push(job.work);
        }
        Some(jobs)
    }

    /// Whether a thread may hold a job of this line.
    pub(super) fn is_busy(&self, line: LineId) -> bool {
        self.lines.get(&line).is_some_and(|line| line.busy > 0)
    }

    /// Whether everything given to this line was submitted.
    pub(super) fn is_clear(&self, line: LineId) -> bool {
        self.lines.get(&line).is_none_or(|line| line.jobs.is_empty() && !line.submitting)
    }

    /// Whether a line's stream may be used by others now: everything was submitted, and no wait is missing.
    pub(super) fn is_open(&self, id: LineId) -> bool {
        self.is_clear(id) && self.lines.get(&id).is_some_and(|line| line.broken.is_none())
    }

    /// How a job's submission ended; `None` if it has not.
    pub(super) fn outcome(&mut self, line: LineId, number: u64) -> Option<Result<()>> {
        let Some(line) = self.lines.get_mut(&line) else { return Some(Err(HostError::StagingStopped)) };
        if let Some(error) = line.failures.get(&number) {
            return Some(Err(error.clone()));
        }
        #[cfg(test)]
        if self.mutant == Some(Mutant::WaitShort) {
            let waits = line.jobs.iter().any(|job| job.number == number && job.unassigned().is_some());
            return if waits { None } else { Some(Ok(())) };
        }
        if line.jobs.iter().any(|job| job.number == number && !job.dead) { None } else { Some(Ok(())) }
    }

    /// All that a line's stream may lack has been waited for: it may go on.
    pub(super) fn mend(&mut self, line: LineId) {
        if let Some(line) = self.lines.get_mut(&line) {
            line.broken = None;
        }
    }

    /// Forgets a line, with the jobs it still has, which must be dropped outside the lock.
    pub(super) fn remove_line(&mut self, id: LineId) -> Vec<J> {
        let Some(line) = self.lines.remove(&id) else { return Vec::new() };
        self.orphans.extend(line.flying);
        let mut jobs = Vec::with_capacity(line.jobs.len());
        for job in line.jobs {
            self.free.extend(job.ready.into_iter().flatten());
            jobs.push(job.work);
        }
        jobs
    }

    #[cfg(test)]
    pub(super) fn free_slots(&self) -> usize {
        self.free.len()
    }

    /// All slots that the device may still read.
    pub(super) fn all_flying(&self) -> Vec<Flight> {
        let lines = self.lines.values().flat_map(|line| line.flying.iter());
        lines.chain(&self.orphans).copied().collect()
    }

    /// Whether a slot was lost: the device may read it for ever.
    pub(super) fn has_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Ends all threads; what was not submitted is not.
    pub(super) fn stop(&mut self) {
        self.stopping = true;
    }

    /// Takes a job out of its line; if it has not begun, only what follows its beginning.
    fn fail(&mut self, id: LineId, number: u64, error: HostError) -> Option<J> {
        let line = self.lines.get_mut(&id)?;
        let at = line.jobs.iter().position(|job| job.number == number)?;
        let job = &mut line.jobs[at];
        for slot in job.ready.drain(..).flatten() {
            line.taken -= 1;
            self.free.push(slot);
        }
        line.failures.entry(number).or_insert(error);
        if line.failures.len() > FAILURES {
            line.failures.pop_first();
        }
        #[cfg(test)]
        let begins = self.mutant != Some(Mutant::DropWaits);
        #[cfg(not(test))]
        let begins = true;
        if !job.begun && line.broken.is_none() && begins {
            job.dead = true;
            job.chunks = job.submitted;
            return None;
        }
        line.jobs.remove(at).map(|job| job.work)
    }

    fn lose(&mut self, why: Option<&HostError>) {
        self.slots -= 1;
        self.lost = why.cloned().or_else(|| self.lost.take());
    }
}
