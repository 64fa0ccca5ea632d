//! Every completion order of the schedule's commands, for all small cases.

use super::Command;
use super::Ring;
use super::model::{Action, Mutation, check};

const HONEST: Mutation = |_, _| {};

fn rings() -> Vec<Ring> {
    vec![
        Ring::dense(1, &[1; 3]),
        Ring::dense(2, &[1; 3]),
        Ring::dense(2, &[1; 4]),
        Ring::dense(3, &[1; 5]),
        Ring::dense(3, &[2, 1, 2, 1]),
        Ring::dense(3, &[2, 2, 2]),
        Ring::dense(4, &[3, 1, 2, 1, 3]),
        Ring::dense(4, &[1, 2, 0, 3, 1]),
        Ring::dense(5, &[2, 2, 2, 2]),
        Ring { cells: 4, runs: vec![(0, 2), (1, 2), (2, 2), (3, 2)] },
    ]
}

/// All sequences of `length` units.
fn sequences(units: usize, length: u32) -> impl Iterator<Item = Vec<u32>> {
    (0..units.pow(length))
        .map(move |number| (0..length).map(|place| (number / units.pow(place) % units) as u32).collect())
}

fn steps(visits: &[&[u32]]) -> Vec<Action> {
    let mut actions = Vec::new();
    for step in visits {
        actions.push(Action::BeginStep);
        actions.extend(step.iter().map(|&unit| Action::Visit(unit)));
        actions.push(Action::EndStep);
    }
    actions
}

fn must_hold(ring: &Ring, order: &[u32], look_ahead: u32, actions: &[Action]) -> usize {
    check(ring, &mut ring.schedule(order, look_ahead), actions, HONEST).unwrap_or_else(|error| {
        panic!("{error}\n{ring:?}\norder {order:?}, look-ahead {look_ahead}\n{actions:?}")
    })
}

#[test]
fn every_step_after_every_step_reads_its_own_bytes() {
    let (mut cases, mut states) = (0_u64, 0_u64);
    for ring in rings() {
        let units = ring.runs.len();
        let order: Vec<u32> = (0..units as u32).collect();
        for look_ahead in [0, 1, 2, 8] {
            for first in sequences(units, 4) {
                // The first step follows the order, then does anything; the second does it again, or the order.
                let surprising = [order.as_slice(), &first].concat();
                states += must_hold(&ring, &order, look_ahead, &steps(&[&surprising, &first])) as u64;
                states += must_hold(&ring, &order, look_ahead, &steps(&[&first, &first, &order])) as u64;
                cases += 2;
            }
        }
    }
    assert!(cases > 3_000 && states > 1_000_000, "{cases} cases, {states} states");
}

#[test]
fn two_units_open_at_once_and_holds_read_their_own_bytes() {
    for ring in rings() {
        let units = ring.runs.len() as u32;
        let order: Vec<u32> = (0..units).collect();
        for (outer, inner) in (0..units).flat_map(|a| (0..units).map(move |b| (a, b))) {
            if outer != inner && ring.overlap(outer as usize, inner as usize) {
                continue;
            }
            for look_ahead in [0, 1, 3] {
                use Action::{BeginStep, Compute, EndStep, Enter, Hold, Leave, Release, Visit};
                let mut actions = vec![BeginStep, Visit(0), Enter(outer), Compute(outer), Enter(inner)];
                actions.extend([Compute(inner), Compute(outer), Leave(inner), Compute(outer), Leave(outer)]);
                actions.extend((0..units).map(Visit));
                actions.extend([EndStep, Hold(outer), Compute(outer), BeginStep]);
                actions.extend((0..units).map(Visit)); // Those that conflict with the hold are refused.
                actions.extend([Compute(outer), EndStep, Release(outer)]);
                actions.extend(steps(&[&order, &order]));
                must_hold(&ring, &order, look_ahead, &actions);
            }
        }
    }
}

#[test]
fn a_step_after_an_error_at_any_place_reads_its_own_bytes() {
    for ring in rings() {
        let order: Vec<u32> = (0..ring.runs.len() as u32).collect();
        for look_ahead in [0, 1, 2, 8] {
            for reached in 0..order.len() {
                let mut actions = steps(&[&order]);
                actions.push(Action::BeginStep);
                actions.extend(order[..reached].iter().map(|&unit| Action::Visit(unit)));
                actions.extend([
                    Action::Enter(order[reached]),
                    Action::Compute(order[reached]),
                    Action::Reset,
                ]);
                actions.extend(steps(&[&order, &order]));
                must_hold(&ring, &order, look_ahead, &actions);
            }
        }
    }
}

#[test]
fn visits_of_unmarked_steps_read_their_own_bytes() {
    for ring in rings() {
        for look_ahead in [0, 1, 8] {
            for visits in sequences(ring.runs.len(), 3) {
                let actions: Vec<Action> = visits.repeat(4).into_iter().map(Action::Visit).collect();
                must_hold(&ring, &[], look_ahead, &actions);
            }
        }
    }
}

/// How many of the small cases a broken schedule fails.
fn failures(mutate: Mutation) -> usize {
    let mut failures = 0;
    for ring in rings() {
        let order: Vec<u32> = (0..ring.runs.len() as u32).collect();
        for look_ahead in [1, 8] {
            let mut schedule = ring.schedule(&order, look_ahead);
            failures += usize::from(check(&ring, &mut schedule, &steps(&[&order, &order]), mutate).is_err());
        }
    }
    failures
}

#[test]
fn a_broken_schedule_is_found() {
    assert_eq!(failures(HONEST), 0);
    let without_copied: Mutation =
        |commands, _| commands.retain(|command| !matches!(command, Command::WaitCopied(_)));
    let without_last_use: Mutation =
        |commands, _| commands.retain(|command| !matches!(command, Command::WaitLastUse(_)));
    let recorded_early: Mutation = |commands, action| match action {
        Action::Enter(unit) => commands.push(Command::RecordLastUse(crate::UnitId(unit))),
        _ => commands.retain(|command| !matches!(command, Command::RecordLastUse(_))),
    };
    for (name, mutation) in
        [("WaitCopied", without_copied), ("WaitLastUse", without_last_use), ("RecordLastUse", recorded_early)]
    {
        let found = failures(mutation);
        assert!(found > rings().len(), "{name} broken was found in {found} cases only");
    }
}
