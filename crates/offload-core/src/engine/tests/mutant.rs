//! Deliberate mistakes, each of which the suite must notice. They exist in test builds only.

use crate::model::UnitId;
use crate::plan::Plan;
use crate::schedule::{Command, Schedule, UnitView};

/// A mistake in the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::engine) enum Mutant {
    /// Computation does not wait for copies.
    DropWaitCopied,
    /// Copies do not wait for computation.
    DropWaitLastUse,
    /// The last use of a unit is recorded when it is entered.
    RecordEarly,
    /// Every unit is free to overwrite the unit whose ring bytes begin where its own end.
    SlotShort,
    /// The last page of a unit is not copied.
    SkipPage,
    /// A compute stream that takes over does not wait for the one before it.
    DropHandoff,
    /// Computation does not wait until a unit's job of the staging ring is submitted.
    DropWaitSubmitted,
    /// A replan does not wait for the work that uses the pages it takes away.
    FreeBeforeEvent,
    /// What becomes resident is not copied.
    TrustPages,
    /// Units in use are not copied anew when the budget shrinks under them.
    ForgetOpen,
    /// Pages that a plan gives up are not given back.
    KeepPages,
}

/// Makes the mistake in what the schedule says.
pub(in crate::engine) fn mutate(mutant: Option<Mutant>, commands: &mut Vec<Command>) {
    match mutant {
        Some(Mutant::DropWaitCopied) => commands.retain(|command| !matches!(command, Command::WaitCopied(_))),
        Some(Mutant::DropWaitLastUse) => {
            commands.retain(|command| !matches!(command, Command::WaitLastUse(_)));
        }
        Some(Mutant::RecordEarly) => {
            commands.retain(|command| !matches!(command, Command::RecordLastUse(_)));
            let entered = commands.iter().find_map(|command| match *command {
                Command::WaitCopied(unit) => Some(unit),
                _ => None,
            });
            commands.extend(entered.map(|UnitId(unit)| Command::RecordLastUse(UnitId(unit))));
        }
        Some(
            Mutant::SlotShort
            | Mutant::SkipPage
            | Mutant::DropHandoff
            | Mutant::DropWaitSubmitted
            | Mutant::FreeBeforeEvent
            | Mutant::TrustPages
            | Mutant::ForgetOpen
            | Mutant::KeepPages,
        )
        | None => {}
    }
}

/// Makes the mistake in what the schedule knows.
pub(in crate::engine) fn mutate_schedule(
    mutant: Option<Mutant>,
    plan: &Plan,
    schedule: Schedule,
) -> Schedule {
    if mutant != Some(Mutant::SlotShort) {
        return schedule;
    }
    // Each unit forgets the first unit it shares memory with, and is forgotten by it.
    let mut views: Vec<UnitView> = plan
        .units
        .iter()
        .map(|unit| UnitView { streamed: !unit.is_resident(), conflicts: unit.conflicts.clone() })
        .collect();
    for unit in 0..views.len() {
        let neighbour = views[unit].conflicts.iter().next();
        if let Some(neighbour) = neighbour {
            for (unit, other) in [(UnitId(unit as u32), neighbour), (neighbour, UnitId(unit as u32))] {
                let conflicts = &mut views[unit.0 as usize].conflicts;
                *conflicts = conflicts.iter().filter(|&conflict| conflict != other).collect();
            }
        }
    }
    Schedule::new(&views, &plan.order, plan.look_ahead).unwrap()
}
