//! Reports of several processes as one.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::reports;
use proptest::prelude::*;
use startup_timing::{
    Clock, Part, PartState, PhaseId, ProcessFacts, Report, Status, TimingError, merge, read_bytes, to_json,
};

fn part(rank: u32, boot: &str, monotonic: u64, unix: u64, report: &Report) -> Part {
    let mut report = report.clone();
    report.clock = Clock { monotonic_origin: monotonic, unix_origin: unix, boot_id: boot.into() };
    report.processes[0] = ProcessFacts { pid: 100 + rank, rank: Some(rank), ..ProcessFacts::default() };
    Part { file: format!("rank{rank}.json"), report: Ok(report) }
}

proptest! {
    #[test]
    fn all_is_kept_and_moved_to_one_clock(a in reports(), b in reports(), late in 0..50_u64, swap: bool) {
        let mut parts = vec![part(0, "boot", 1_000, 0, &a), part(1, "boot", 1_000 + late, 0, &b)];
        if swap {
            parts.reverse();
        }
        let merged = merge(parts).unwrap();
        prop_assert_eq!(merged.phases.len(), a.phases.len() + b.phases.len() + 2);
        prop_assert_eq!(merged.duration, a.duration.max(late + b.duration));
        let (first, second) = merged.phases.split_at(a.phases.len() + 1);
        for (part, original, offset, rank) in [(first, &a, 0, 0), (second, &b, late, 1)] {
            prop_assert_eq!(&part[0].name, &format!("rank {rank}"));
            prop_assert_eq!((part[0].start, part[0].duration), (offset, original.duration));
            for (moved, phase) in part[1..].iter().zip(&original.phases) {
                prop_assert_eq!(moved.start, phase.start + offset);
                prop_assert_eq!((&moved.name, moved.duration, moved.process), (&phase.name, phase.duration, rank));
                let parent = phase.parent.map_or(part[0].id, |id| PhaseId(id.0 + part[0].id.0));
                prop_assert_eq!(moved.parent, Some(parent));
            }
        }
        // One tree like any other: it is sound, and can be merged again.
        prop_assert_eq!(read_bytes(to_json(&merged).unwrap().as_bytes(), "merged").unwrap(), merged.clone());
        let again = merge(vec![Part { file: "m.json".into(), report: Ok(merged.clone()) }]).unwrap();
        prop_assert_eq!(again.phases, merged.phases);
    }
}

#[test]
fn missing_and_unreadable_files_are_named_and_the_rest_is_merged() {
    let report = common::report(&[(None, "load", 0, 10)]);
    let missing = startup_timing::read(std::path::Path::new("/nowhere.json")).unwrap_err();
    let foreign = read_bytes(b"{\"a\": 1}", "b.json").unwrap_err();
    let mut partial = part(2, "boot", 5, 0, &report);
    partial.report.as_mut().unwrap().complete = false;
    let merged = merge(vec![
        Part { file: "/nowhere.json".into(), report: Err(missing) },
        partial,
        Part { file: "b.json".into(), report: Err(foreign) },
        part(0, "boot", 0, 0, &report),
    ])
    .unwrap();
    let states: Vec<_> = merged.processes.iter().map(|facts| (facts.rank, facts.state)).collect();
    assert_eq!(
        states,
        [
            (Some(0), PartState::Complete),
            (Some(2), PartState::Partial),
            (None, PartState::Missing),
            (None, PartState::Unreadable)
        ]
    );
    assert!(!merged.complete && merged.phases[2].status == Status::Open);
    let table = startup_timing::table(&merged).unwrap().to_string();
    for said in ["/nowhere.json", "b.json is not a report", "rank 2 (rank2.json): the recording did not end"]
    {
        assert!(table.contains(said), "{table}");
    }
}

#[test]
fn nothing_to_merge_is_an_error_that_says_why() {
    let foreign = read_bytes(b"[]", "b.json").unwrap_err();
    let error = merge(vec![Part { file: "b.json".into(), report: Err(foreign) }]).unwrap_err();
    assert!(matches!(error, TimingError::Nothing(_)) && error.to_string().contains("b.json"), "{error}");
    assert!(matches!(merge(Vec::new()), Err(TimingError::Nothing(_))));
}

#[test]
fn other_boots_are_placed_by_wall_time_and_ranks_that_come_twice_are_noted() {
    let report = common::report(&[(None, "load", 0, 10)]);
    let merged = merge(vec![part(1, "a", 0, 900, &report), part(1, "b", 777, 1_000, &report)]).unwrap();
    assert_eq!(merged.phases[2].start, 100);
    assert!(merged.notes.iter().any(|note| note.contains("wall time")), "{:?}", merged.notes);
    assert!(merged.notes.contains(&"more than one process has rank 1".into()));
}
