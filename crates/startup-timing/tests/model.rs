//! The record and its analysis against a model that counts nanosecond by nanosecond.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use common::{Step, file, play, reports, steps};
use proptest::prelude::*;
use startup_timing::{Event, Report, Status, TimingError, read_bytes, to_json};

/// What the record shall be, as plainly as it can be said.
#[derive(Debug, Default)]
struct Model {
    /// Parent, start, end.
    phases: Vec<(Option<usize>, u64, Option<u64>)>,
}

impl Model {
    fn play(steps: &[(u64, Step)]) -> (Self, u64) {
        let (mut model, mut at, mut last) = (Self::default(), 0, 0);
        for (wait, step) in steps {
            at += wait;
            match *step {
                Step::Begin(place, _) => {
                    let mut parent =
                        place.filter(|_| !model.phases.is_empty()).map(|p| p % model.phases.len());
                    while let Some(index) = parent.filter(|&index| model.phases[index].2.is_some()) {
                        parent = model.phases[index].0;
                    }
                    model.phases.push((parent, at, None));
                }
                Step::End(place, _) => {
                    let count = model.phases.len();
                    let Some(index) = (count > 0).then(|| place % count) else { continue };
                    if model.phases[index].2.is_some() {
                        continue;
                    }
                    model.phases[index].2 = Some(at);
                    let up = model.phases[index].0;
                    for phase in model.phases.iter_mut().filter(|p| p.0 == Some(index) && p.2.is_none()) {
                        phase.0 = up;
                    }
                }
            }
            last = at;
        }
        (model, last)
    }
}

/// Whether a phase covers the nanosecond that begins at `at`.
fn covers(report: &Report, index: usize, at: u64) -> bool {
    let phase = &report.phases[index];
    (phase.start..phase.end()).contains(&at)
}

proptest! {
    #[test]
    fn the_record_is_the_model(steps in steps()) {
        let (model, last) = Model::play(&steps);
        let (_, record) = play(&steps);
        prop_assert_eq!(record.last(), last);
        let phases = record.phases(last + 5);
        prop_assert_eq!(phases.len(), model.phases.len());
        for (phase, (parent, start, end)) in phases.iter().zip(&model.phases) {
            prop_assert_eq!(phase.parent.map(|id| id.0), parent.map(|index| index as u64 + 1));
            prop_assert_eq!(phase.start, *start);
            prop_assert_eq!(phase.end(), end.unwrap_or(last + 5));
            prop_assert_eq!(phase.status == Status::Open, end.is_none());
        }
    }

    #[test]
    fn every_phase_lies_inside_its_parent_and_comes_after_it(report in reports()) {
        for phase in &report.phases {
            if let Some(parent) = phase.parent {
                prop_assert!(parent < phase.id);
                let parent = &report.phases[parent.0 as usize - 1];
                prop_assert!(parent.start <= phase.start && phase.end() <= parent.end());
            }
            prop_assert!(phase.end() <= report.duration);
            prop_assert!(phase.outlived.is_none_or(|outlived| outlived < phase.id && Some(outlived) != phase.parent));
        }
    }

    #[test]
    fn exclusive_times_and_gaps_are_what_counting_gives(report in reports()) {
        let analysis = report.analysis().unwrap();
        let all: Vec<usize> = (0..report.phases.len()).collect();
        let child_of = |child: usize, parent: usize| {
            report.phases[child].parent.is_some_and(|id| id.0 as usize == parent + 1)
        };
        for &index in &all {
            let alone = (0..report.duration).filter(|&at| {
                covers(&report, index, at) && !all.iter().any(|&c| child_of(c, index) && covers(&report, c, at))
            });
            prop_assert_eq!(analysis.exclusive[index], alone.count() as u64);
        }
        let gap = (0..report.duration).filter(|&at| !all.iter().any(|&index| covers(&report, index, at)));
        prop_assert_eq!(analysis.gap, gap.count() as u64);
        let sum: u64 = analysis.exclusive.iter().sum();
        prop_assert_eq!(sum + analysis.gap - analysis.overlap, report.duration);
        let mut walk = analysis.walk();
        walk.sort_unstable();
        prop_assert_eq!(walk, all);
    }

    #[test]
    fn a_report_comes_back_from_its_json(report in reports()) {
        let again = read_bytes(to_json(&report).unwrap().as_bytes(), "json").unwrap();
        prop_assert_eq!(again, report);
    }

    #[test]
    fn a_file_that_was_cut_anywhere_gives_what_was_written_before(steps in steps(), at in 0.0..1.0) {
        let (events, _) = play(&steps);
        let text = file(&events);
        #[expect(clippy::cast_sign_loss, reason = "between 0 and 1")]
        let cut = &text.as_bytes()[..(at * text.len() as f64) as usize];
        let head = text.find('\n').unwrap();
        match read_bytes(cut, "cut") {
            Ok(report) => {
                let whole = String::from_utf8_lossy(cut).matches('\n').count().saturating_sub(1);
                let begun = events[..whole].iter().filter(|e| matches!(e, Event::Begin { .. })).count();
                // A line without its end may still be whole.
                prop_assert!(report.phases.len() == begun || report.phases.len() == begun + 1);
                prop_assert!(!report.complete);
                prop_assert!(report.processes[0].rank == Some(3));
            }
            Err(error) => {
                prop_assert!(cut.len() <= head, "{error}");
                let foreign = matches!(error, TimingError::Foreign { .. });
                prop_assert!(foreign, "{}", error);
            }
        }
    }
}

#[test]
fn an_unbalanced_or_foreign_event_is_an_error_that_changes_nothing() {
    use startup_timing::{Amounts, Levels, PhaseId, Record};
    let begin = |id, parent, at| Event::Begin {
        id: PhaseId(id),
        parent,
        name: "a".into(),
        at,
        thread: String::new(),
        sync: 0,
    };
    let end = |id, at| Event::End {
        id: PhaseId(id),
        at,
        status: Status::Success,
        error: None,
        counters: Amounts::new(),
        levels: Levels::new(),
        sync: 0,
    };
    let mut record = Record::new();
    record.apply(begin(1, None, 5)).unwrap();
    assert!(matches!(record.apply(end(2, 6)), Err(TimingError::UnknownPhase(PhaseId(2)))));
    assert!(matches!(
        record.apply(begin(2, Some(PhaseId(9)), 6)),
        Err(TimingError::UnknownPhase(PhaseId(9)))
    ));
    assert!(matches!(record.apply(begin(7, None, 6)), Err(TimingError::UnknownPhase(PhaseId(7)))));
    assert!(matches!(record.apply(end(1, 4)), Err(TimingError::OutOfOrder { at: 4, last: 5 })));
    record.apply(end(1, 8)).unwrap();
    let error = record.apply(end(1, 9)).unwrap_err();
    assert_eq!(error.to_string(), "phase 1 has ended already; end each phase once");
    record.apply(Event::Close { at: 9, dropped: 0 }).unwrap();
    assert!(matches!(record.apply(begin(2, None, 10)), Err(TimingError::Closed)));
    assert_eq!((record.phases(0).len(), record.last()), (1, 9));
}

#[test]
fn what_is_beyond_the_limits_is_counted_and_not_recorded() {
    use startup_timing::{MAX_DEPTH, MAX_NAME_BYTES, Recorder, RecorderOptions};
    let recorder = Recorder::new(RecorderOptions::default()).unwrap();
    let mut spans = vec![recorder.phase(&"ü".repeat(MAX_NAME_BYTES))];
    for _ in 0..MAX_DEPTH + 3 {
        spans.push(spans.last().unwrap().phase("deeper"));
    }
    let report = recorder.report().unwrap();
    assert_eq!(report.phases[0].name.len(), MAX_NAME_BYTES);
    // What lies in a phase that was dropped is dropped with it, and never gets another parent.
    assert_eq!((report.dropped, report.phases.len()), (1, MAX_DEPTH));
    assert_eq!(report.analysis().unwrap().depth, (0..MAX_DEPTH).collect::<Vec<_>>());
}
