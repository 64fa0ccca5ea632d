//! Reports as JSON. Times are seconds; what can be worked out from the rest is written for readers that do not.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::analysis::Analysis;
use crate::clock::Clock;
use crate::error::Result;
use crate::phase::{Amounts, Levels, Phase, PhaseId, Status};
use crate::report::{ProcessFacts, Report, SCHEMA, SCHEMA_VERSION};

#[derive(Serialize)]
struct Written<'a> {
    schema: &'static str,
    schema_version: u64,
    complete: bool,
    duration: f64,
    unattributed: f64,
    overlap: f64,
    synchronization: f64,
    dropped: u64,
    clock: &'a Clock,
    processes: &'a [ProcessFacts],
    environment: &'a Map<String, Value>,
    notes: &'a [String],
    phases: Vec<WrittenPhase<'a>>,
}

#[derive(Serialize)]
struct WrittenPhase<'a> {
    id: PhaseId,
    parent_id: Option<PhaseId>,
    name: &'a str,
    start_offset: f64,
    duration: f64,
    exclusive: f64,
    status: Status,
    error_type: Option<&'a str>,
    thread: &'a str,
    process: usize,
    outlived: Option<PhaseId>,
    sync_before: f64,
    sync_inside: f64,
    counters: &'a Amounts,
    levels: &'a Levels,
}

/// Seconds; nanoseconds up to 26 days come back exactly.
pub(crate) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// The report as one JSON object.
pub fn to_json(report: &Report) -> Result<String> {
    let analysis = report.analysis()?;
    let written = Written {
        schema: SCHEMA,
        schema_version: SCHEMA_VERSION,
        complete: report.complete,
        duration: seconds(report.duration),
        unattributed: seconds(analysis.gap),
        overlap: seconds(analysis.overlap),
        synchronization: seconds(report.synchronization()),
        dropped: report.dropped,
        clock: &report.clock,
        processes: &report.processes,
        environment: &report.environment,
        notes: &report.notes,
        phases: phases(report, &analysis),
    };
    // Maps with text keys and finite numbers: serde_json refuses neither.
    Ok(serde_json::to_string(&written).unwrap_or_default())
}

fn phases<'a>(report: &'a Report, analysis: &Analysis) -> Vec<WrittenPhase<'a>> {
    let written = |(phase, exclusive): (&'a Phase, &u64)| WrittenPhase {
        id: phase.id,
        parent_id: phase.parent,
        name: &phase.name,
        start_offset: seconds(phase.start),
        duration: seconds(phase.duration),
        exclusive: seconds(*exclusive),
        status: phase.status,
        error_type: phase.error_type.as_deref(),
        thread: &phase.thread,
        process: phase.process,
        outlived: phase.outlived,
        sync_before: seconds(phase.sync_before),
        sync_inside: seconds(phase.sync_inside),
        counters: &phase.counters,
        levels: &phase.levels,
    };
    report.phases.iter().zip(&analysis.exclusive).map(written).collect()
}
