//! What other programs get.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeMap;

use common::{report, reports};
use proptest::prelude::*;
use serde_json::Value;
use startup_timing::{Part, Status, chrome_trace, folded_stacks, merge, table};

fn near(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-6
}

proptest! {
    #[test]
    fn events_of_a_track_nest_and_are_those_of_the_report(a in reports(), b in reports()) {
        let parts = [a, b].map(|report| Part { file: "a".into(), report: Ok(report) });
        let report = merge(parts.into()).unwrap();
        let trace: Value = serde_json::from_str(&chrome_trace(&report).unwrap()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |kind: &str| events.iter().filter(|event| event["ph"] == kind).collect::<Vec<_>>();
        let spans = of("X");
        prop_assert_eq!(spans.len(), report.phases.len());
        let number = |event: &Value, field: &str| event[field].as_f64().unwrap();
        for (event, phase) in spans.iter().zip(&report.phases) {
            prop_assert_eq!(event["name"].as_str().unwrap(), phase.name.as_str());
            prop_assert!(near(number(event, "ts") * 1e3, phase.start as f64));
            prop_assert!(near(number(event, "dur") * 1e3, phase.duration as f64));
            prop_assert_eq!(event["pid"].as_u64(), Some(phase.process as u64));
        }
        let named: Vec<_> = of("M").iter().filter(|event| event["name"] == "thread_name")
            .map(|event| (event["pid"].to_string(), event["tid"].to_string())).collect();
        let mut tracks: BTreeMap<_, Vec<(f64, f64)>> = BTreeMap::new();
        for event in &spans {
            let track = (event["pid"].to_string(), event["tid"].to_string());
            prop_assert!(named.contains(&track));
            let ts = number(event, "ts");
            tracks.entry(track).or_default().push((ts, ts + number(event, "dur")));
        }
        for spans in tracks.values() {
            for (index, a) in spans.iter().enumerate() {
                for b in &spans[index + 1..] {
                    let apart = a.1 <= b.0 + 1e-6 || b.1 <= a.0 + 1e-6;
                    let inside = |x: &(f64, f64), y: &(f64, f64)| y.0 - 1e-6 <= x.0 && x.1 <= y.1 + 1e-6;
                    prop_assert!(apart || inside(a, b) || inside(b, a), "{:?} {:?}", a, b);
                }
            }
        }
        for event in of("C") {
            prop_assert!(event["args"]["value"].is_i64());
        }
    }

    #[test]
    fn folded_lines_sum_to_the_exclusive_times(report in reports()) {
        let text = folded_stacks(&report).unwrap();
        let mut sum = 0;
        for line in text.lines() {
            let (path, count) = line.split_once(' ').unwrap();
            prop_assert!(!path.is_empty() && !path.contains(char::is_whitespace));
            sum += count.parse::<u64>().unwrap();
        }
        prop_assert_eq!(sum, report.analysis().unwrap().exclusive.iter().sum::<u64>());
    }
}

#[test]
fn names_cannot_break_the_formats() {
    let report = report(&[(None, "a;b c\n1\u{1b}[31m", 0, 10), (Some(0), "", 2, 3)]);
    assert_eq!(folded_stacks(&report).unwrap(), "a:b_c_1_[31m 7\na:b_c_1_[31m;_ 3\n");
    let shown = table(&report).unwrap().to_string();
    assert!(shown.contains("a;b c?1?[31m") && !shown.contains('\u{1b}'), "{shown}");
}

#[test]
fn the_table_is_a_tree_with_what_a_reader_must_know() {
    let mut report = report(&[
        (None, "pipeline.create", 100_000, 5_000_000),
        (Some(0), "component.vae", 200_000, 3_000_000),
        (None, "first_request", 6_000_000, 2_500_000_000),
    ]);
    report.phases[2].status = Status::Error;
    report.phases[2].error_type = Some("OutOfMemoryError".into());
    report.phases[1].sync_inside = 1_500;
    report.processes[0].age = Some(1_200_000_000);
    report.dropped = 2;
    let wanted = "\
phase                                 start     time  of it alone   share
pipeline.create                    100.0 µs   5.0 ms       2.0 ms   0.2 %
  component.vae                    200.0 µs   3.0 ms       3.0 ms   0.1 %
first_request  (OutOfMemoryError)    6.0 ms  2.500 s      2.500 s  99.8 %

recorded 2.506 s, of which 1.0 ms in no phase
1.5 µs in the synchronization callback
2 phases were beyond the limits and not recorded
the process was 1.200 s old when recording began
";
    assert_eq!(table(&report).unwrap().to_string(), wanted);
}

#[test]
fn counters_are_events_of_their_own_and_what_is_not_known_is_none() {
    let mut report = report(&[(None, "read", 1_000, 5_000)]);
    report.phases[0].counters.extend([("io.rchar".into(), Some(256)), ("faults".into(), None)]);
    report.phases[0].levels.insert("memory.anonymous".into(), (Some(10), Some(20)));
    let trace: Value = serde_json::from_str(&chrome_trace(&report).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let counters: Vec<_> = events
        .iter()
        .filter(|event| event["ph"] == "C")
        .map(|event| {
            (event["name"].as_str().unwrap(), event["ts"].as_f64().unwrap(), event["args"]["value"].clone())
        })
        .collect();
    let wanted = [
        ("memory.anonymous", 1.0, 10.into()),
        ("memory.anonymous", 6.0, 20.into()),
        ("io.rchar", 1.0, 0.into()),
        ("io.rchar", 6.0, 256.into()),
    ];
    assert_eq!(counters, wanted);
    let span = events.iter().find(|event| event["ph"] == "X").unwrap();
    assert!(span["args"]["faults"].is_null() && span["args"]["io.rchar"] == 256);
}
