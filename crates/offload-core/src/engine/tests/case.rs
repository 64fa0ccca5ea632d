//! One random model, run for a few steps in a random way.
//!
//! A case is a seed. It draws unlike blocks in several towers, budgets, look-aheads, granularities, copy orders and
//! compute streams; visits with skips, repeats, surprises and units inside units; holds; driver errors; steps that are
//! never ended; and plans replaced between steps. It fails if any computation reads a wrong byte, a call fails
//! without cause, or anything is left behind.

use gpu_driver::{Bytes, StreamHandle, Verb};

use super::Mutant;
use super::desc::RigDesc;
use super::draw::{draw_plan, draw_rig};
use super::rig::{Failure, Rig};
use super::rng::Rng;
use super::source::ModelFile;
use crate::engine::EngineError;
use crate::model::UnitId;
use crate::plan::Plan;

/// What a case did, so that the suite can show that it does what it says.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Tally {
    /// Under some plan more copies were made than it has streamed units.
    pub(super) streamed_twice: bool,
    pub(super) replans: u64,
    pub(super) raises: u64,
    pub(super) lowers: u64,
    /// Higher budgets that a failure prevented.
    pub(super) unraised: u64,
    /// Lower budgets that a failure left to the next step.
    pub(super) completed: u64,
    pub(super) shrinks: u64,
    /// Steps that a failure in a shrink ended.
    pub(super) spoilt: u64,
    pub(super) failed_steps: u64,
    pub(super) lost_steps: u64,
    pub(super) conflicts: u64,
    pub(super) holds: u64,
    pub(super) on_demand: u64,
    pub(super) staged_bytes: u64,
    pub(super) host_waits: u64,
    pub(super) cut_files: u64,
}

/// Runs the case of a seed, with a mistake in the engine if one is given. Of several failures, wrong bytes come first.
pub(super) fn run(seed: u64, mutant: Option<Mutant>) -> Result<Tally, Failure> {
    let mut rng = Rng::new(seed);
    let desc = draw_rig(&mut rng, seed, mutant);
    let layout = desc.layout();
    let plans: Vec<(Plan, u64)> = (0..rng.within(1, 3)).map(|_| draw_plan(&mut rng, &layout)).collect();
    let limit = plans.iter().map(|(_, budget)| *budget).max().unwrap_or_default();
    let plans = plans.into_iter().map(|(plan, _)| plan).collect();
    let mut case = Case::new(rng, &desc, plans, limit)?;
    let ran = case.run();
    // Whatever happened, nothing may be in flight when the rig goes.
    let finished = case.rig.finish();
    let closed = case.rig.engine.close(StreamHandle::DEFAULT).map_err(Failure::Error);
    match (ran, finished) {
        (Err(Failure::Error(_)), Err(wrong @ Failure::Wrong(_))) => return Err(wrong),
        (ran, finished) => ran.and(finished).and(closed)?,
    }
    let (peak, highest) = (case.rig.pool.report().peak, case.highest);
    if peak > Bytes(highest) {
        return Err(Failure::Left(format!("{peak} of pages were held, the highest limit was {highest}")));
    }
    let (host, tally) = (case.rig.host.clone(), case.tally);
    case.rig.drop_engine_then_streams();
    if !host.counters().nothing_alive() {
        return Err(Failure::Left(format!("left behind: {:?}", host.counters())));
    }
    Ok(tally)
}

/// What a replan calls.
pub(super) const REPLANNING: [Verb; 7] = [
    Verb::MapPages,
    Verb::UnmapPages,
    Verb::SetAccess,
    Verb::CreatePages,
    Verb::CreateEvent,
    Verb::CopyToDevice,
    Verb::SynchronizeStream,
];

pub(super) struct Case {
    pub(super) rng: Rng,
    pub(super) rig: Rig,
    plans: Vec<Plan>,
    /// Units entered and not left, the innermost last.
    pub(super) open: Vec<UnitId>,
    pub(super) held: Vec<UnitId>,
    /// Copies made when the plan was put in place.
    pub(super) copies_before: u64,
    /// The budget that counts, or will from the next step on.
    pub(super) budget: u64,
    /// The highest that ever counted.
    pub(super) highest: u64,
    /// A copy ahead may have failed, in the ring's threads, and say so when its unit is entered.
    pub(super) late: bool,
    /// A failure took the memory of the step under way.
    pub(super) spoilt: bool,
    pub(super) tally: Tally,
}

impl Case {
    fn new(rng: Rng, desc: &RigDesc, mut plans: Vec<Plan>, limit: u64) -> Result<Self, Failure> {
        let first = plans.remove(0);
        let rig = Rig::new(desc, first, limit)?;
        let (open, held) = (Vec::new(), Vec::new());
        let tally = Tally::default();
        Ok(Self {
            rng,
            rig,
            plans,
            open,
            held,
            copies_before: 0,
            budget: limit,
            highest: limit,
            late: false,
            spoilt: false,
            tally,
        })
    }

    fn run(&mut self) -> Result<(), Failure> {
        for _ in 0..self.rng.within(3, 5) {
            if self.held.is_empty() && self.rng.once_in(2) {
                if self.rng.once_in(2) { self.replan()? } else { self.rebudget()? }
            }
            if self.rng.once_in(6) {
                self.hold_some()?;
            }
            let fault = self.rng.once_in(5);
            if fault {
                self.arm(&[
                    Verb::CopyToDevice,
                    Verb::WaitEvent,
                    Verb::RecordEvent,
                    Verb::IsCapturing,
                    Verb::Fill,
                    Verb::CopyToHost,
                ]);
            }
            let cut = !fault && self.rig.file.is_some() && self.rng.once_in(4);
            if cut {
                self.cut_file();
            }
            let stepped = self.step();
            self.rig.device.reset();
            if cut {
                self.mend_file();
            }
            match stepped {
                Err(Failure::Error(error))
                    if (fault || cut || self.late || self.spoilt) && is_meant(&error) =>
                {
                    self.tally.cut_files += u64::from(matches!(error, EngineError::Unread { .. }));
                    self.late = false;
                    self.give_up_step()?;
                }
                other => {
                    other?;
                    self.late |= (fault || cut) && self.rig.engine.is_staged();
                }
            }
            self.count_copies();
            self.check_pages()?;
            if self.rng.once_in(2) {
                self.rig.finish()?;
            }
            if self.rng.once_in(2) {
                self.release_all()?;
            }
        }
        self.release_all()?;
        self.rig.finish()
    }

    fn cut_file(&self) {
        self.rig.file.iter().for_each(ModelFile::cut);
    }

    fn mend_file(&self) {
        self.rig.file.iter().for_each(ModelFile::mend);
    }

    pub(super) fn arm(&mut self, verbs: &[Verb]) {
        self.rig.device.reset();
        self.rig.device.fail(self.rng.pick(verbs), self.rng.below(25));
    }

    /// A step, in the order of the plan more or less.
    fn step(&mut self) -> Result<(), Failure> {
        self.rig.begin()?;
        let current = self.rig.engine.plan();
        let mut visits = self.rig.engine.order();
        visits.retain(|unit| (unit.0 as usize) < current.units.len());
        let all: Vec<UnitId> = (0..current.units.len() as u32).map(UnitId).collect();
        for _ in 0..self.rng.pick(&[0, 0, 0, 1, 2, 5]) {
            let (place, unit) = (self.rng.below(visits.len() as u64 + 1) as usize, self.rng.pick(&all));
            match self.rng.below(3) {
                0 => visits.insert(place, unit),
                1 if place < visits.len() => _ = visits.remove(place),
                _ => visits.rotate_left(place / 2),
            }
        }
        if self.rng.once_in(3) {
            self.rig.compute_base()?;
        }
        for unit in visits {
            if self.rng.once_in(4) {
                self.rig.next_stream();
            }
            if !self.enter(unit)? {
                continue;
            }
            if self.rng.once_in(5) {
                let inner = self.rng.pick(&all);
                if self.enter(inner)? {
                    self.leave()?;
                    self.rig.compute(unit)?;
                }
            }
            self.leave()?;
        }
        if self.rng.once_in(15) {
            // As if the caller had been interrupted: nothing is left, nothing is ended.
            let lost = self.rng.pick(&all);
            self.enter(lost)?;
            self.open.clear();
            self.tally.lost_steps += 1;
            return Ok(());
        }
        Ok(self.rig.end()?)
    }

    /// Enters and computes a unit; says no if it shares memory with one in use.
    fn enter(&mut self, unit: UnitId) -> Result<bool, Failure> {
        match self.rig.enter(unit) {
            Err(EngineError::Conflict { .. }) if !(self.open.is_empty() && self.held.is_empty()) => {
                self.tally.conflicts += 1;
                return Ok(false);
            }
            other => other?,
        }
        self.open.push(unit);
        self.rig.compute(unit)?;
        if self.rng.once_in(20) {
            self.shrink()?;
            for unit in self.open.clone() {
                self.rig.compute(unit)?;
            }
            for unit in self.held.clone() {
                self.rig.compute(unit)?;
            }
        }
        Ok(true)
    }

    fn leave(&mut self) -> Result<(), Failure> {
        match self.open.pop() {
            Some(unit) => Ok(self.rig.leave(unit)?),
            None => Ok(()),
        }
    }

    /// After a failed call: closes what is open, as try and finally do, or walks away.
    fn give_up_step(&mut self) -> Result<(), Failure> {
        self.tally.failed_steps += 1;
        self.tally.spoilt += u64::from(self.spoilt);
        if self.rng.once_in(2) {
            while !self.open.is_empty() {
                self.leave()?;
            }
            match self.rig.end() {
                Err(EngineError::NoStep) => {} // It was the beginning that failed.
                Err(EngineError::StepFailed) if self.spoilt => {}
                other => {
                    other?;
                    if self.spoilt {
                        return Err(Failure::Left("a step without its memory ended well".into()));
                    }
                }
            }
        }
        self.open.clear();
        self.spoilt = false;
        Ok(())
    }

    /// Puts the next plan in place while computation may still be running; it may fail and be completed later.
    fn replan(&mut self) -> Result<(), Failure> {
        let Some(next) = self.plans.pop() else { return Ok(()) };
        if next.physical_bytes() > Bytes(self.budget) {
            let refused = self.rig.engine.replan(next);
            return match refused {
                Err(
                    EngineError::PageLimit { .. } | EngineError::OtherThread | EngineError::InStep { .. },
                ) => Ok(()),
                other => Err(Failure::Left(format!("a plan over the budget: {other:?}"))),
            };
        }
        self.rig.engine.abandon_step();
        let fault = self.rng.once_in(3);
        if fault {
            self.arm(&REPLANNING);
        }
        let replanned = self.rig.engine.replan(next);
        self.rig.device.reset();
        match replanned {
            Err(error) if fault && is_injected(&error) => {}
            other => other?,
        }
        self.late = false; // All copies ahead were taken back.
        self.tally.replans += 1;
        self.copies_before = self.rig.engine.stats().copies;
        Ok(())
    }

    fn hold_some(&mut self) -> Result<(), Failure> {
        let units = self.rig.engine.plan().units.len() as u64;
        let unit = UnitId(self.rng.below(units) as u32);
        if self.rig.engine.report().replan_pending {
            return Ok(()); // The numbers will mean other units.
        }
        self.rig.engine.abandon_step(); // If the last one was never ended.
        match self.rig.hold(unit) {
            Err(EngineError::Conflict { .. }) if !self.held.is_empty() => self.tally.conflicts += 1,
            Err(error) if self.late && is_meant(&error) => self.late = false,
            other => {
                other?;
                self.held.push(unit);
                self.tally.holds += 1;
                self.rig.compute(unit)?;
            }
        }
        Ok(())
    }

    fn release_all(&mut self) -> Result<(), Failure> {
        let held = std::mem::take(&mut self.held);
        for &unit in &held {
            if !self.rig.engine.report().recovery_pending {
                self.rig.compute(unit)?;
            }
        }
        Ok(self.rig.engine.release(&held, self.rig.stream())?)
    }

    fn count_copies(&mut self) {
        let streamed = self.rig.engine.plan().units.iter().filter(|unit| !unit.is_resident()).count() as u64;
        let stats = self.rig.engine.stats();
        self.tally.streamed_twice |= stats.copies - self.copies_before > streamed;
        self.tally.on_demand = stats.fetched_on_demand;
        self.tally.staged_bytes = stats.staged_bytes;
        self.tally.host_waits = stats.host_waits;
    }
}

/// Whether the cause is a failure made on purpose.
pub(super) fn is_injected(error: &EngineError) -> bool {
    error.to_string().contains("was made to fail")
}

/// As [`is_injected`], or a file that was cut.
fn is_meant(error: &EngineError) -> bool {
    is_injected(error) || matches!(error, EngineError::Unread { .. })
}
