//! A model of a device: a copy queue and a compute queue, each in order, neither waiting for the other except where
//! told. Every state the two can reach together is visited.
//!
//! The host only ever submits, so what it submits does not depend on what has completed; submitting everything at
//! once allows every interleaving that submitting step by step does, and more. The ring's content depends on the
//! copy queue's place alone. A state is therefore a pair of places, and all of them can be checked.

use super::{Command, Ring, Schedule, UnitId};

/// What one queue does, in order. Copies and computations have a begin and an end, so that they can overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Goes on once the other queue has got to this place.
    Wait(usize),
    Begin(usize),
    End(usize),
}

/// What the host does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    BeginStep,
    EndStep,
    /// Enter, compute, leave.
    Visit(u32),
    Enter(u32),
    Compute(u32),
    Leave(u32),
    Hold(u32),
    Release(u32),
    /// An error: wait for both queues, start over.
    Reset,
}

/// A command taken out of, or put into, what the schedule says; for checking that the checker can fail.
pub(super) type Mutation = fn(&mut Vec<Command>, Action);

/// The device and what has been submitted to it since both queues were last idle.
struct Device<'a> {
    ring: &'a Ring,
    copies: Vec<Step>,
    computes: Vec<Step>,
    /// The place in the copy queue up to which a unit's latest copy is done, by unit; zero is never.
    copied: Vec<usize>,
    /// The place in the compute queue up to which a unit's latest use is over, by unit; zero is never.
    used: Vec<usize>,
    /// What is in the ring when both queues are idle: unit and place in it.
    content: Vec<Option<(usize, usize)>>,
}

impl Device<'_> {
    fn submit(&mut self, commands: &[Command]) -> Result<(), String> {
        for &command in commands {
            match command {
                Command::WaitLastUse(UnitId(unit)) => {
                    let place = self.used[unit as usize];
                    if place == 0 {
                        return Err(format!("a copy waits for a use of unit {unit} that was not recorded"));
                    }
                    self.copies.push(Step::Wait(place));
                }
                Command::Copy(UnitId(unit)) => {
                    self.copies.extend([Step::Begin(unit as usize), Step::End(unit as usize)]);
                }
                Command::RecordCopied(UnitId(unit)) => self.copied[unit as usize] = self.copies.len(),
                Command::WaitCopied(UnitId(unit)) => {
                    self.computes.push(Step::Wait(self.copied[unit as usize]));
                }
                Command::RecordLastUse(UnitId(unit)) => self.used[unit as usize] = self.computes.len(),
                Command::Evict(_) => {}
            }
        }
        Ok(())
    }

    fn compute(&mut self, unit: u32) {
        self.computes.extend([Step::Begin(unit as usize), Step::End(unit as usize)]);
    }

    /// Visits every reachable state, then leaves both queues idle.
    fn explore(&mut self) -> Result<usize, String> {
        let (rows, columns) = (self.copies.len() + 1, self.computes.len() + 1);
        let contents = self.contents();
        let running = |steps: &[Step], place: usize| match place.checked_sub(1).map(|last| steps[last]) {
            Some(Step::Begin(unit)) => Some(unit),
            _ => None,
        };
        let mut seen = vec![false; rows * columns];
        let mut open = vec![(0, 0)];
        let mut states = 0;
        while let Some((copy, compute)) = open.pop() {
            if std::mem::replace(&mut seen[copy * columns + compute], true) {
                continue;
            }
            states += 1;
            if let Some(unit) = running(&self.computes, compute) {
                if let Some(other) = running(&self.copies, copy)
                    && self.ring.overlap(unit, other)
                {
                    return Err(format!("unit {other} is copied over unit {unit} while that is computed"));
                }
                let whole = self.ring.cells_of(unit).enumerate();
                if let Some((_, cell)) =
                    whole.into_iter().find(|&(place, cell)| contents[copy][cell] != Some((unit, place)))
                {
                    return Err(format!("unit {unit} reads {:?} in cell {cell}", contents[copy][cell]));
                }
            }
            let may = |steps: &[Step], place: usize, other: usize| match steps.get(place) {
                Some(Step::Wait(until)) => other >= *until,
                Some(_) => true,
                None => false,
            };
            let (copies, computes) = (may(&self.copies, copy, compute), may(&self.computes, compute, copy));
            if copies {
                open.push((copy + 1, compute));
            }
            if computes {
                open.push((copy, compute + 1));
            }
            if !copies && !computes && (copy + 1, compute + 1) != (rows, columns) {
                return Err(format!("both queues wait: copies at {copy}, computation at {compute}"));
            }
        }
        self.content = contents.into_iter().next_back().unwrap_or_default();
        self.copies.clear();
        self.computes.clear();
        self.copied.fill(0);
        self.used.fill(0);
        Ok(states)
    }

    /// The ring's content at each place of the copy queue. A copy under way has spoiled its target.
    fn contents(&self) -> Vec<Vec<Option<(usize, usize)>>> {
        let mut contents = vec![self.content.clone()];
        let mut now = self.content.clone();
        for step in &self.copies {
            match *step {
                Step::Wait(_) => {}
                Step::Begin(unit) => self.ring.cells_of(unit).for_each(|cell| now[cell] = None),
                Step::End(unit) => {
                    self.ring
                        .cells_of(unit)
                        .enumerate()
                        .for_each(|(place, cell)| now[cell] = Some((unit, place)));
                }
            }
            contents.push(now.clone());
        }
        contents
    }
}

/// Runs `actions` and checks every order in which what they enqueue can complete. Gives back the number of states.
///
/// A visit that is refused because of a conflict is left out; anything else the schedule refuses is an error.
pub(super) fn check(
    ring: &Ring,
    schedule: &mut Schedule,
    actions: &[Action],
    mutate: Mutation,
) -> Result<usize, String> {
    let units = ring.runs.len();
    let mut device = Device {
        ring,
        copies: Vec::new(),
        computes: Vec::new(),
        copied: vec![0; units],
        used: vec![0; units],
        content: vec![None; ring.cells],
    };
    let mut states = 0;
    for &action in actions {
        let mut commands = Vec::new();
        let mut call = |schedule: &mut Schedule, action| {
            commands.clear();
            let done = match action {
                Action::BeginStep => {
                    schedule.begin_step(&mut commands);
                    Ok(())
                }
                Action::EndStep => {
                    schedule.end_step(&mut commands);
                    Ok(())
                }
                Action::Enter(unit) => schedule.enter(UnitId(unit), &mut commands),
                Action::Leave(unit) => schedule.leave(UnitId(unit), &mut commands),
                Action::Hold(unit) => schedule.hold(UnitId(unit), &mut commands),
                Action::Release(unit) => schedule.release(UnitId(unit), &mut commands),
                Action::Visit(_) | Action::Compute(_) | Action::Reset => Ok(()),
            };
            if done.is_ok() {
                mutate(&mut commands, action);
            }
            done.map(|()| commands.clone())
        };
        match action {
            Action::Visit(unit) => {
                if let Ok(commands) = call(schedule, Action::Enter(unit)) {
                    device.submit(&commands)?;
                    device.compute(unit);
                    device
                        .submit(&call(schedule, Action::Leave(unit)).map_err(|error| error.to_string())?)?;
                }
            }
            Action::Compute(unit) => device.compute(unit),
            Action::Reset => {
                states += device.explore()?;
                schedule.reset();
                let mut commands = Vec::new();
                schedule.refill(&mut commands);
                device.submit(&commands)?;
            }
            other => device.submit(&call(schedule, other).map_err(|error| error.to_string())?)?,
        }
    }
    Ok(states + device.explore()?)
}
