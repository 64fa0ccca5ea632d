//! What the schedule enqueues, visit by visit.

use super::{Command, Ring, Schedule, ScheduleError, UnitId};

/// A schedule and the commands of the last call, as short text: `c3` copies unit 3, `d3` records that it was
/// copied, `w3` waits for that, `l3` records its last use, `u3` waits for its last use, `e3` evicts it.
struct Script {
    schedule: Schedule,
    commands: Vec<Command>,
}

impl Script {
    fn new(ring: &Ring, order: &[u32], look_ahead: u32) -> Self {
        Self { schedule: ring.schedule(order, look_ahead), commands: Vec::new() }
    }

    fn text(&mut self) -> String {
        let word = |command: Command| match command {
            Command::WaitLastUse(unit) => format!("u{}", unit.0),
            Command::Evict(unit) => format!("e{}", unit.0),
            Command::Copy(unit) => format!("c{}", unit.0),
            Command::RecordCopied(unit) => format!("d{}", unit.0),
            Command::WaitCopied(unit) => format!("w{}", unit.0),
            Command::RecordLastUse(unit) => format!("l{}", unit.0),
        };
        self.commands.drain(..).map(word).collect::<Vec<_>>().join(" ")
    }

    fn begin(&mut self) -> String {
        self.schedule.begin_step(&mut self.commands);
        self.text()
    }

    fn end(&mut self) -> String {
        self.schedule.end_step(&mut self.commands);
        self.text()
    }

    fn enter(&mut self, unit: u32) -> String {
        self.schedule.enter(UnitId(unit), &mut self.commands).unwrap();
        self.text()
    }

    fn leave(&mut self, unit: u32) -> String {
        self.schedule.leave(UnitId(unit), &mut self.commands).unwrap();
        self.text()
    }

    fn visit(&mut self, unit: u32) -> String {
        let entered = self.enter(unit);
        let left = self.leave(unit);
        format!("{entered} | {left}")
    }

    /// A whole step; gives back how many copies it issued.
    fn step(&mut self, units: &[u32]) -> usize {
        let mut all = self.begin();
        for &unit in units {
            all += " ";
            all += &self.visit(unit);
        }
        all += " ";
        all += &self.end();
        all.split(' ').filter(|word| word.starts_with('c')).count()
    }
}

#[test]
fn two_slots_copy_one_ahead() {
    let mut script = Script::new(&Ring::dense(2, &[1; 4]), &[0, 1, 2, 3], 8);
    assert_eq!(script.begin(), "c0 d0 c1 d1");
    assert_eq!(script.enter(0), "w0");
    assert_eq!(script.leave(0), "l0 u0 c2 d2");
    assert_eq!(script.enter(1), "w1");
    assert_eq!(script.leave(1), "l1 u1 c3 d3");
    assert_eq!(script.visit(2), "w2 | l2 u2 c0 d0", "the next step's first unit follows");
    assert_eq!(script.visit(3), "w3 | l3 u3 c1 d1");
    assert_eq!(script.end(), "");
    assert_eq!(script.begin(), "");
    assert_eq!(script.enter(0), "w0");
    assert_eq!(script.schedule.fetched_on_demand(), 0);
}

#[test]
fn one_slot_copies_after_the_unit_before() {
    let mut script = Script::new(&Ring::dense(1, &[1; 3]), &[0, 1, 2], 8);
    assert_eq!(script.begin(), "c0 d0");
    assert_eq!(script.visit(0), "w0 | l0 u0 c1 d1");
    assert_eq!(script.visit(1), "w1 | l1 u1 c2 d2");
}

#[test]
fn no_look_ahead_copies_at_the_turn() {
    let mut script = Script::new(&Ring::dense(2, &[1; 3]), &[0, 1, 2], 0);
    assert_eq!(script.begin(), "");
    assert_eq!(script.visit(0), "c0 d0 w0 | l0");
    assert_eq!(script.visit(1), "c1 d1 w1 | l1");
    assert_eq!(script.visit(2), "u0 c2 d2 w2 | l2");
}

#[test]
fn a_copy_waits_once_for_the_latest_of_several_uses() {
    // Unit 2 is as large as units 0 and 1 together.
    let mut script = Script::new(&Ring { cells: 2, runs: vec![(0, 1), (1, 1), (0, 2)] }, &[0, 1, 2], 8);
    script.begin();
    assert_eq!(script.visit(0), "w0 | l0");
    assert_eq!(script.visit(1), "w1 | l1 u1 c2 d2");
    assert_eq!(script.visit(2), "w2 | l2 u2 c0 d0 c1 d1", "one wait serves both copies");
}

#[test]
fn resident_units_need_nothing_and_take_no_look_ahead() {
    let ring = Ring { cells: 2, runs: vec![(0, 1), (0, 0), (0, 0), (1, 1)] };
    let mut script = Script::new(&ring, &[0, 1, 2, 3], 1);
    assert_eq!(script.begin(), "c0 d0");
    assert_eq!(script.visit(0), "w0 c3 d3 | l0");
    assert_eq!(script.visit(1), " | ");
    assert_eq!(script.visit(2), " | ");
    assert_eq!(script.visit(3), "w3 | l3");
    script.end();
    assert_eq!(script.schedule.order(), [UnitId(0), UnitId(1), UnitId(2), UnitId(3)]);
    assert_eq!(script.step(&[0, 1, 2, 3]), 0, "both units fit the ring for good");
}

#[test]
fn a_repeat_finds_its_bytes() {
    let mut script = Script::new(&Ring::dense(2, &[1; 3]), &[0, 1, 2], 8);
    script.begin();
    script.visit(0);
    assert_eq!(script.enter(1), "w1");
    script.leave(1);
    script.step(&[0, 0, 1, 2]);
    // The order with the repeat is known now: unit 0 is kept for its second visit.
    script.begin();
    assert_eq!(script.enter(0), "w0");
    assert_eq!(script.leave(0), "l0", "unit 2 must wait for the repeat");
    assert_eq!(script.visit(0), "w0 | l0 u0 c2 d2");
    assert_eq!(script.schedule.fetched_on_demand(), 1, "only the surprise of the step before");
}

#[test]
fn a_skip_resynchronizes_at_the_next_occurrence() {
    let mut script = Script::new(&Ring::dense(2, &[1; 6]), &[0, 1, 2, 3, 4, 5], 8);
    script.begin();
    script.visit(0);
    // Unit 1 is skipped; unit 2 was copied after unit 0 was left. Unit 3 follows over unit 1, which was never used.
    assert_eq!(script.enter(2), "w2 c3 d3");
    assert_eq!(script.leave(2), "l2 u2 c4 d4");
    assert_eq!(script.visit(3), "w3 | l3 u3 c5 d5");
}

#[test]
fn a_new_order_is_learned_in_one_step() {
    let mut script = Script::new(&Ring::dense(2, &[1; 5]), &[0, 1, 2, 3, 4], 8);
    let reversed = [4, 3, 2, 1, 0];
    script.step(&reversed);
    let surprises = script.schedule.fetched_on_demand();
    assert!(surprises > 0);
    // Units 2 and 1 share no slot in this order's steady state, so each copy is ahead of its turn again.
    script.step(&reversed);
    script.step(&reversed);
    assert_eq!(script.schedule.order().iter().map(|unit| unit.0).collect::<Vec<_>>(), reversed);
    assert_eq!(script.schedule.fetched_on_demand(), surprises);
}

#[test]
fn steps_nobody_marks_are_learned_too() {
    let mut script = Script::new(&Ring::dense(2, &[1; 4]), &[], 8);
    for _ in 0..3 {
        for unit in [2, 0, 0, 3, 1] {
            script.visit(unit);
        }
    }
    let surprises = script.schedule.fetched_on_demand();
    for unit in [2, 0, 0, 3, 1] {
        script.visit(unit);
    }
    assert_eq!(script.schedule.order().iter().map(|unit| unit.0).collect::<Vec<_>>(), [2, 0, 0, 3, 1]);
    assert_eq!(script.schedule.fetched_on_demand(), surprises);
}

#[test]
fn visits_between_marked_steps_teach_nothing() {
    let mut script = Script::new(&Ring::dense(2, &[1; 4]), &[0, 1, 2, 3], 8);
    script.step(&[0, 1, 2, 3]);
    script.visit(2);
    script.step(&[0, 1, 2, 3]);
    assert_eq!(script.schedule.order().len(), 4);
}

#[test]
fn entering_a_unit_within_itself_counts() {
    let mut script = Script::new(&Ring::dense(2, &[1; 3]), &[0, 1, 2], 8);
    script.begin();
    assert_eq!(script.enter(0), "w0");
    assert_eq!(script.enter(0), "w0");
    assert_eq!(script.leave(0), "", "still open");
    assert_eq!(script.leave(0), "l0 u0 c2 d2");
    let error = script.schedule.leave(UnitId(0), &mut script.commands).unwrap_err();
    assert_eq!(error, ScheduleError::NotOpen { unit: UnitId(0) });
}

#[test]
fn a_unit_in_use_is_never_overwritten() {
    let mut script = Script::new(&Ring::dense(2, &[1; 4]), &[0, 1, 2, 3], 8);
    script.begin();
    script.enter(0);
    assert_eq!(script.visit(1), "w1 | l1", "unit 2 shares memory with unit 0, which is open");
    let error = script.schedule.enter(UnitId(2), &mut script.commands).unwrap_err();
    assert_eq!(error, ScheduleError::Conflict { unit: UnitId(2), open: UnitId(0) });
    assert_eq!(script.text(), "", "a refusal enqueues nothing");
    assert_eq!(script.leave(0), "l0 u0 c2 d2 c3 d3", "and changes nothing: unit 2 is still expected");
}

#[test]
fn a_held_unit_stays_until_released() {
    let mut script = Script::new(&Ring::dense(2, &[1; 4]), &[0, 1, 2, 3], 8);
    script.begin();
    script.schedule.hold(UnitId(3), &mut script.commands).unwrap();
    assert_eq!(script.text(), "c3 d3 w3", "over unit 1, which is not expected first");
    assert_eq!(script.visit(0), "w0 | l0");
    let error = script.schedule.enter(UnitId(1), &mut script.commands).unwrap_err();
    assert_eq!(error, ScheduleError::Conflict { unit: UnitId(1), open: UnitId(3) });
    assert!(script.schedule.leave(UnitId(3), &mut script.commands).is_err(), "a hold is released, not left");
    script.schedule.release(UnitId(3), &mut script.commands).unwrap();
    assert_eq!(script.text(), "l3 u3 c1 d1 c2 d2");
    let error = script.schedule.release(UnitId(3), &mut script.commands).unwrap_err();
    assert_eq!(error, ScheduleError::NotHeld { unit: UnitId(3) });
}

#[test]
fn a_reset_closes_visits_and_keeps_holds() {
    let mut script = Script::new(&Ring::dense(2, &[1; 4]), &[0, 1, 2, 3], 8);
    script.begin();
    script.schedule.hold(UnitId(3), &mut script.commands).unwrap();
    script.enter(0);
    script.schedule.reset();
    assert_eq!(script.schedule.open_units().collect::<Vec<_>>(), [UnitId(3)]);
    script.schedule.refill(&mut script.commands);
    assert_eq!(script.text(), "c3 d3 w3");
    assert_eq!(script.begin(), "c0 d0");
    assert_eq!(script.visit(0), "w0 | l0");
}

#[test]
fn evictions_are_announced_when_asked() {
    let mut script = Script::new(&Ring::dense(1, &[1; 2]), &[0, 1], 8);
    script.schedule.announce_evictions(true);
    script.begin();
    assert_eq!(script.visit(0), "w0 | l0 u0 e0 c1 d1");
}

#[test]
fn an_unknown_unit_is_refused() {
    let ring = Ring::dense(2, &[1; 2]);
    let error = Schedule::new(&ring.views(), &[UnitId(2)], 1).unwrap_err();
    assert_eq!(error.to_string(), "unit 2 is not one of the plan's 2 units");
    let mut script = Script::new(&ring, &[0, 1], 1);
    assert!(script.schedule.enter(UnitId(7), &mut script.commands).is_err());
}

#[test]
fn steady_visits_keep_to_the_memory_they_have() {
    let mut script = Script::new(&Ring::dense(3, &[1, 2, 1, 1, 2, 1]), &[0, 1, 2, 3, 4, 5], 8);
    let mut commands = Vec::with_capacity(16);
    let mut step = |schedule: &mut Schedule| {
        commands.clear();
        schedule.begin_step(&mut commands);
        for unit in (0..6).map(UnitId) {
            commands.clear();
            schedule.enter(unit, &mut commands).unwrap();
            schedule.leave(unit, &mut commands).unwrap();
        }
        schedule.end_step(&mut commands);
        [commands.capacity(), schedule.present.capacity(), schedule.evicted.capacity()]
    };
    let before = step(&mut script.schedule);
    for _ in 0..100 {
        assert_eq!(step(&mut script.schedule), before);
    }
}
