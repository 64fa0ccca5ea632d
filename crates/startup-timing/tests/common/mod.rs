//! Recordings made of random steps, for the tests that hold for all of them.
#![allow(dead_code, clippy::unwrap_used, reason = "each test uses some of it")]

use proptest::prelude::*;
use startup_timing::{
    Amounts, Clock, Event, Levels, Phase, PhaseId, ProcessFacts, Record, Report, Status, read_bytes,
};

/// What happens next; places are taken modulo what there is.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// A phase begins, in none or in the phase at a place.
    Begin(Option<usize>, u8),
    /// The phase at a place ends, well or not.
    End(usize, bool),
}

/// Steps, each some time after the one before.
pub(crate) fn steps() -> impl Strategy<Value = Vec<(u64, Step)>> {
    let begin = (prop::option::weighted(0.8, 0..1000_usize), 0..4_u8).prop_map(|(p, n)| Step::Begin(p, n));
    let end = (0..1000_usize, prop::bool::weighted(0.9)).prop_map(|(place, well)| Step::End(place, well));
    prop::collection::vec((0..4_u64, prop_oneof![begin, end]), 0..40)
}

/// Plays steps; gives the events that were accepted, and the record.
pub(crate) fn play(steps: &[(u64, Step)]) -> (Vec<Event>, Record) {
    let (mut record, mut events, mut at, mut count) = (Record::new(), Vec::new(), 0, 0);
    for (wait, step) in steps {
        at += wait;
        let event = match *step {
            Step::Begin(place, name) => Event::Begin {
                id: PhaseId(count + 1),
                parent: place.filter(|_| count > 0).map(|place| PhaseId(place as u64 % count + 1)),
                name: ["load", "a;b", "c d", "ü/x"][usize::from(name)].into(),
                at,
                thread: format!("thread {}", name % 2),
                sync: u64::from(name),
            },
            Step::End(_, _) if count == 0 => continue,
            Step::End(place, well) => Event::End {
                id: PhaseId(place as u64 % count + 1),
                at,
                status: if well { Status::Success } else { Status::Error },
                error: (!well).then(|| "ValueError".into()),
                counters: Amounts::from([("bytes".into(), Some(7)), ("unknown".into(), None)]),
                levels: Levels::from([("memory".into(), (Some(1), Some(-2)))]),
                sync: 1,
            },
        };
        let began = matches!(event, Event::Begin { .. });
        if record.apply(event.clone()).is_ok() {
            count += u64::from(began);
            events.push(event);
        }
    }
    (events, record)
}

/// The file of a recording.
pub(crate) fn file(events: &[Event]) -> String {
    let facts = ProcessFacts { pid: 7, rank: Some(3), name: "worker".into(), ..ProcessFacts::default() };
    let clock = Clock { monotonic_origin: 1_000, unix_origin: 5_000, boot_id: "boot".into() };
    let head = serde_json::json!({
        "schema": "weightstream.startup", "schema_version": 1, "kind": "recording", "clock": clock, "process": facts,
    });
    let mut text = head.to_string() + "\n";
    for event in events {
        text += &(serde_json::to_string(event).unwrap() + "\n");
    }
    text
}

/// A report of random steps that ended.
pub(crate) fn reports() -> impl Strategy<Value = Report> {
    steps().prop_map(|steps| {
        let (mut events, record) = play(&steps);
        events.push(Event::Close { at: record.last() + 3, dropped: 0 });
        read_bytes(file(&events).as_bytes(), "steps").unwrap()
    })
}

/// A report of one process with these phases: parent's place, name, start, duration.
pub(crate) fn report(phases: &[(Option<usize>, &str, u64, u64)]) -> Report {
    let phases: Vec<_> = phases
        .iter()
        .enumerate()
        .map(|(index, &(parent, name, start, duration))| Phase {
            id: PhaseId(index as u64 + 1),
            parent: parent.map(|parent| PhaseId(parent as u64 + 1)),
            outlived: None,
            name: name.into(),
            start,
            duration,
            status: Status::Success,
            error_type: None,
            thread: "main".into(),
            process: 0,
            counters: Amounts::new(),
            levels: Levels::new(),
            sync_before: 0,
            sync_inside: 0,
        })
        .collect();
    Report {
        complete: true,
        duration: phases.iter().map(Phase::end).max().unwrap_or(0),
        clock: Clock::default(),
        processes: vec![ProcessFacts { pid: 7, ..ProcessFacts::default() }],
        phases,
        dropped: 0,
        environment: serde_json::Map::new(),
        notes: Vec::new(),
    }
}
