//! The trace format of Chrome, which Perfetto opens: one complete event (`X`) a phase, in microseconds, and counters (`C`).
//!
//! Events of one track must nest. Where those of a thread do not, because a phase outlived another, they get a second track of
//! that thread.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use crate::error::Result;
use crate::phase::{Phase, Status};
use crate::report::Report;

/// The report as one JSON object, with `traceEvents`.
pub fn chrome_trace(report: &Report) -> Result<String> {
    report.analysis()?;
    let mut events = Vec::with_capacity(report.phases.len() + 16);
    for (index, facts) in report.processes.iter().enumerate() {
        let name = json!({ "name": facts.label() });
        events.push(metadata("process_name", index, 0, &name));
        let order = json!({ "sort_index": facts.rank.map_or(index, |rank| rank as usize) });
        events.push(metadata("process_sort_index", index, 0, &order));
    }
    let tracks = Tracks::of(report);
    for ((process, number), name) in &tracks.names {
        events.push(metadata("thread_name", *process, *number, &json!({ "name": name })));
    }
    for (phase, track) in report.phases.iter().zip(&tracks.places) {
        events.push(complete(phase, *track));
        events.extend(counters(phase));
    }
    let trace = json!({
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": { "complete": report.complete, "environment": report.environment, "notes": report.notes },
    });
    Ok(trace.to_string())
}

fn metadata(name: &str, process: usize, thread: usize, args: &Value) -> Value {
    json!({ "ph": "M", "name": name, "pid": process, "tid": thread, "args": args })
}

/// Microseconds, whole nanoseconds kept.
fn microseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e3
}

fn complete(phase: &Phase, track: usize) -> Value {
    let mut args = Map::new();
    args.insert("id".into(), json!(phase.id));
    args.insert("status".into(), json!(phase.status));
    if let Some(error) = &phase.error_type {
        args.insert("error_type".into(), json!(error));
    }
    for (name, amount) in &phase.counters {
        args.insert(name.clone(), json!(amount));
    }
    for (name, (before, after)) in &phase.levels {
        args.insert(name.clone(), json!([before, after]));
    }
    if phase.sync_before + phase.sync_inside > 0 {
        args.insert("sync_before_us".into(), json!(microseconds(phase.sync_before)));
        args.insert("sync_inside_us".into(), json!(microseconds(phase.sync_inside)));
    }
    let (start, duration) = (microseconds(phase.start), microseconds(phase.duration));
    let mut event = json!({
        "ph": "X", "name": phase.name, "cat": "startup", "pid": phase.process, "tid": track,
        "ts": start, "dur": duration, "args": args,
    });
    if phase.status == Status::Error {
        event["cname"] = json!("terrible");
    }
    event
}

/// Levels as they were at both ends; amounts as nothing at the beginning and all of it at the end.
fn counters(phase: &Phase) -> Vec<Value> {
    let event = |name: &str, at: u64, value: i64| {
        json!({
            "ph": "C", "name": name, "pid": phase.process, "tid": 0, "ts": microseconds(at),
            "args": { "value": value },
        })
    };
    let mut events = Vec::new();
    for (name, (before, after)) in &phase.levels {
        events.extend(before.map(|value| event(name, phase.start, value)));
        events.extend(after.map(|value| event(name, phase.end(), value)));
    }
    for (name, amount) in phase.counters.iter().filter_map(|(name, amount)| Some((name, (*amount)?))) {
        events.push(event(name, phase.start, 0));
        events.push(event(name, phase.end(), amount));
    }
    events
}

/// A track, and the ends of the phases that are open on it.
struct Track {
    number: usize,
    open: Vec<u64>,
}

/// Where each phase is drawn.
struct Tracks {
    places: Vec<usize>,
    names: Vec<((usize, usize), String)>,
}

impl Tracks {
    fn of(report: &Report) -> Self {
        // For each process and thread, its tracks.
        let mut threads: BTreeMap<(usize, &str), Vec<Track>> = BTreeMap::new();
        let mut next: BTreeMap<usize, usize> = BTreeMap::new();
        let mut names = Vec::new();
        let mut places = vec![0; report.phases.len()];
        let mut order: Vec<usize> = (0..report.phases.len()).collect();
        // Those that begin together: the longer one contains the other. A parent comes before its child.
        order.sort_by_key(|&index| {
            let phase = &report.phases[index];
            (phase.start, std::cmp::Reverse(phase.duration), index)
        });
        for index in order {
            let phase = &report.phases[index];
            let tracks = threads.entry((phase.process, &phase.thread)).or_default();
            let end = phase.end();
            let fits = |Track { open, .. }: &mut Track| {
                while open.last().is_some_and(|&until| until <= phase.start) {
                    open.pop();
                }
                open.last().is_none_or(|&until| end <= until)
            };
            let track = if let Some(track) = tracks.iter_mut().position(fits) {
                &mut tracks[track]
            } else {
                let number = next.entry(phase.process).or_insert(1);
                let thread = if phase.thread.is_empty() { "recording" } else { &phase.thread };
                let name = if tracks.is_empty() {
                    thread.to_owned()
                } else {
                    format!("{thread} ({})", tracks.len() + 1)
                };
                names.push(((phase.process, *number), name));
                tracks.push(Track { number: *number, open: Vec::new() });
                *number += 1;
                let last = tracks.len() - 1;
                &mut tracks[last]
            };
            track.open.push(end);
            places[index] = track.number;
        }
        Self { places, names }
    }
}
