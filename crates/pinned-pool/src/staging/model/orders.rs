//! Every order in which threads and device can act, on small cases: each state that can be reached is visited once.

use std::collections::{BTreeMap, HashSet};

use super::device::World;
use crate::error::HostError;
use crate::staging::queue::{Fate, Flight, LineId, Mutant, Next, Place, Queue, Step, Turn};

/// What a thread is in the middle of.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Doing {
    Filling(Place),
    Submitting(Turn),
    Polling(Vec<Flight>),
    /// Was answered and has not said so yet.
    Landing(Vec<Flight>),
    /// As those two, by somebody who is no thread of the ring.
    Asking(Vec<Flight>),
    Answered(Vec<Flight>),
}

/// What may go wrong or be called off once, at any moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    Read,
    Begin,
    Copy(Fate),
    Cancel,
    /// Somebody else asks which slots were reached.
    Reap,
}

#[derive(Debug, Clone)]
struct State {
    queue: Queue<u64>,
    world: World,
    doing: Vec<Doing>,
    /// Job → chunks, by line.
    jobs: BTreeMap<(LineId, u64), usize>,
    trouble: Trouble,
    failed: Vec<(LineId, u64)>,
}

/// Lines with the chunks of their jobs, slots and threads.
struct Case {
    lines: &'static [&'static [usize]],
    slots: u32,
    threads: usize,
}

impl State {
    fn new(case: &Case, mutant: Option<Mutant>, trouble: Trouble) -> Self {
        let mut queue = Queue::new(case.slots);
        queue.mutant = mutant;
        let mut jobs = BTreeMap::new();
        for line in case.lines {
            let id = queue.add_line();
            for &chunks in *line {
                let number = queue.submit(id, chunks as u64, chunks).unwrap();
                jobs.insert((id, number), chunks);
            }
        }
        let world = World::new(case.slots);
        Self { queue, world, doing: Vec::new(), jobs, trouble, failed: Vec::new() }
    }

    /// All states that can follow.
    fn successors(&self, threads: usize) -> Vec<Self> {
        let mut found = Vec::new();
        let mut follow = |act: &dyn Fn(&mut Self) -> bool| {
            let mut next = self.clone();
            if act(&mut next) {
                next.check();
                found.push(next);
            }
        };
        let outside = |doing: &&Doing| matches!(doing, Doing::Asking(_) | Doing::Answered(_));
        if self.doing.len() - self.doing.iter().filter(outside).count() < threads {
            follow(&Self::take);
        }
        for index in 0..self.doing.len() {
            follow(&|state| state.finish(index, false));
            if !matches!(self.trouble, Trouble::None | Trouble::Cancel | Trouble::Reap) {
                follow(&|state| state.finish(index, true));
            }
        }
        for line in self.world.runnable() {
            follow(&|state| {
                state.world.run(line);
                true
            });
        }
        if self.trouble == Trouble::Reap {
            follow(&Self::reap);
        }
        if self.trouble == Trouble::Cancel {
            follow(&|state| state.cancel(1));
        }
        found
    }

    /// A thread asks what to do; false if that is nothing.
    fn take(&mut self) -> bool {
        match self.queue.next() {
            Next::Idle | Next::Stop => return false,
            Next::Fill(place, _) => {
                self.world.begin_fill(place.slot);
                self.doing.push(Doing::Filling(place));
            }
            Next::Submit(turn, _) => self.doing.push(Doing::Submitting(turn)),
            Next::Poll(slots) => self.doing.push(Doing::Polling(slots)),
            Next::Drop(line, _) => {
                self.failed.extend(self.jobs.keys().filter(|(of, _)| *of == line));
                self.queue.done(line);
            }
        }
        self.doing.sort();
        true
    }

    /// A thread is done with what it does, in vain if `fails`.
    fn finish(&mut self, index: usize, fails: bool) -> bool {
        let error = || Err(HostError::Forked);
        match (self.doing.remove(index), self.trouble) {
            (Doing::Filling(place), Trouble::Read) if fails => {
                self.failed.push((place.line, place.job));
                self.queue.filled(place, error());
                self.queue.done(place.line);
            }
            (Doing::Filling(place), _) if !fails => {
                self.world.filled(place.slot, Some((place.line, place.job, place.chunk)));
                self.queue.filled(place, Ok(()));
                self.queue.done(place.line);
            }
            (Doing::Submitting(turn), Trouble::Copy(fate))
                if fails && matches!(turn.step, Step::Copy { .. }) =>
            {
                if fate != Fate::Unused {
                    self.submit(turn);
                }
                self.failed.push((turn.line, turn.job));
                self.queue.submitted(turn, fate, error());
                self.queue.done(turn.line);
            }
            (Doing::Submitting(turn), Trouble::Begin) if fails && turn.step == Step::Begin => {
                // What is behind it relies on its waits.
                let behind = |(line, job): &&(LineId, u64)| *line == turn.line && *job >= turn.job;
                self.failed.extend(self.jobs.keys().filter(behind));
                self.queue.submitted(turn, Fate::Unused, error());
                self.queue.done(turn.line);
            }
            (Doing::Submitting(turn), _) if !fails => {
                self.submit(turn);
                self.queue.submitted(turn, Fate::Flying, Ok(()));
                self.queue.done(turn.line);
            }
            (Doing::Polling(flights), _) if !fails => {
                let reached = self.reached(&flights);
                self.doing.push(Doing::Landing(reached));
                self.doing.sort();
            }
            (Doing::Landing(reached), _) if !fails => self.queue.polled(&reached, &[]),
            (Doing::Asking(flights), _) if !fails => {
                let reached = self.reached(&flights);
                self.doing.push(Doing::Answered(reached));
                self.doing.sort();
            }
            (Doing::Answered(reached), _) if !fails => self.queue.land(&reached, &[]),
            _ => return false,
        }
        if fails {
            self.trouble = Trouble::None;
        }
        true
    }

    fn reached(&self, flights: &[Flight]) -> Vec<Flight> {
        flights.iter().copied().filter(|flight| self.world.is_reached(flight.slot)).collect()
    }

    /// Somebody else begins to ask.
    fn reap(&mut self) -> bool {
        self.trouble = Trouble::None;
        let flights = self.queue.flying(1);
        self.doing.push(Doing::Asking(flights.clone()));
        self.doing.sort();
        !flights.is_empty()
    }

    fn submit(&mut self, turn: Turn) {
        let chunks = self.jobs.get(&(turn.line, turn.job)).copied().unwrap_or_default();
        self.world.submit(turn.line, turn.job, turn.step, chunks);
    }

    /// A line's jobs are taken back, and another one is given.
    fn cancel(&mut self, line: LineId) -> bool {
        let Some(jobs) = self.queue.cancel(line) else { return false };
        self.trouble = Trouble::None;
        if !jobs.is_empty() {
            self.failed.extend(self.jobs.keys().filter(|(of, _)| *of == line));
        }
        self.queue.mend(line);
        let number = self.queue.submit(line, 2, 2).unwrap();
        self.world.forgive(line, number);
        self.jobs.insert((line, number), 2);
        true
    }

    /// What a waiting caller would be told is true.
    fn check(&mut self) {
        let mut queue = self.queue.clone();
        for &(line, job) in self.jobs.keys() {
            if matches!(queue.outcome(line, job), Some(Ok(()))) && !self.world.has_ended(line, job) {
                self.world.wrong.push(format!("job {job} of line {line} is said to be submitted"));
            }
        }
    }

    /// Nothing can happen any more: everything has ended, and no slot is missing.
    fn check_end(&mut self) {
        let jobs: Vec<_> = self.jobs.keys().copied().collect();
        for (line, job) in jobs {
            match self.queue.outcome(line, job) {
                Some(Ok(())) => {}
                Some(Err(_)) if self.failed.contains(&(line, job)) => {}
                other => self.world.wrong.push(format!("job {job} of line {line} ended with {other:?}")),
            }
        }
        for line in 1..=2 {
            if self.queue.is_busy(line) || !self.queue.is_clear(line) {
                self.world.wrong.push(format!("line {line} is busy at the end"));
            }
        }
        let all = self.queue.all_flying();
        self.queue.land(&all, &[]);
        if self.queue.free_slots() != self.world.slots.len() && !self.queue.has_lost() {
            self.world.wrong.push(format!("{} slots are free at the end", self.queue.free_slots()));
        }
    }
}

/// Visits every state; what was wrong in one of them, and how many there are.
fn explore(case: &Case, mutant: Option<Mutant>, trouble: Trouble) -> Result<usize, String> {
    let mut seen = HashSet::new();
    let mut waiting = vec![State::new(case, mutant, trouble)];
    while let Some(mut state) = waiting.pop() {
        if !seen.insert(format!("{state:?}")) {
            continue;
        }
        let next = state.successors(case.threads);
        // Polling in vain changes nothing, and is all that is left to do when it is all that can be done.
        if next.is_empty() {
            state.check_end();
        }
        if let Some(wrong) = state.world.wrong.first() {
            return Err(wrong.clone());
        }
        waiting.extend(next);
    }
    Ok(seen.len())
}

const CASES: [Case; 5] = [
    Case { lines: &[&[2, 1]], slots: 2, threads: 2 },
    Case { lines: &[&[3], &[1]], slots: 2, threads: 2 },
    Case { lines: &[&[0, 2], &[1]], slots: 1, threads: 2 },
    Case { lines: &[&[2, 2]], slots: 3, threads: 3 },
    Case { lines: &[&[1, 1, 1]], slots: 2, threads: 2 },
];

#[test]
fn every_order_is_right() {
    let states: usize = CASES.iter().map(|case| explore(case, None, Trouble::None).unwrap()).sum();
    assert!(states > 1000, "only {states} states");
}

#[test]
fn every_order_is_right_when_something_fails_or_is_cancelled() {
    for trouble in [
        Trouble::Read,
        Trouble::Begin,
        Trouble::Copy(Fate::Flying),
        Trouble::Copy(Fate::Unused),
        Trouble::Copy(Fate::Lost),
        Trouble::Cancel,
        Trouble::Reap,
    ] {
        for case in &CASES {
            explore(case, None, trouble).unwrap_or_else(|wrong| panic!("{trouble:?}: {wrong}"));
        }
    }
}

#[test]
fn every_mistake_is_noticed() {
    for (mutant, trouble) in [
        (Mutant::ReuseEarly, Trouble::None),
        (Mutant::EndEarly, Trouble::None),
        (Mutant::SkipBegin, Trouble::None),
        (Mutant::SubmitTogether, Trouble::None),
        (Mutant::WaitShort, Trouble::None),
        (Mutant::DropWaits, Trouble::Read),
        (Mutant::StaleAnswer, Trouble::Reap),
    ] {
        let noticed = CASES.iter().any(|case| explore(case, Some(mutant), trouble).is_err());
        assert!(noticed, "{mutant:?} went unnoticed");
    }
}

#[test]
fn lines_have_their_share_of_the_slots() {
    let mut queue: Queue<u32> = Queue::new(4);
    let (first, second) = (queue.add_line(), queue.add_line());
    queue.submit(first, 0, 100).unwrap();
    let fill = |queue: &mut Queue<u32>| match queue.next() {
        Next::Fill(place, _) => Some(place.line),
        Next::Submit(turn, _) => {
            queue.submitted(turn, Fate::Flying, Ok(()));
            queue.done(turn.line);
            None
        }
        _ => None,
    };
    // Alone, a line has all of them but what the others are owed once they come.
    let alone: Vec<_> = (0..6).filter_map(|_| fill(&mut queue)).collect();
    assert_eq!(alone, [first; 4]);
    let mut queue: Queue<u32> = Queue::new(4);
    let (first, second_line) = (queue.add_line(), queue.add_line());
    assert_eq!(second, second_line);
    queue.submit(first, 0, 100).unwrap();
    queue.submit(second, 0, 100).unwrap();
    let both: Vec<_> = (0..8).filter_map(|_| fill(&mut queue)).collect();
    assert_eq!(both, [first, second, first, second]);
}
