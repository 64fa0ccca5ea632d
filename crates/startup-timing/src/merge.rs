//! Several processes' reports as one, on one clock. Pure.

use crate::error::{Result, TimingError};
use crate::phase::{Amounts, Levels, Phase, PhaseId, Status};
use crate::record::{MAX_PHASES, cut};
use crate::report::{PartState, ProcessFacts, Report};

/// What there is of one process.
#[derive(Debug)]
pub struct Part {
    /// The file it was to come from.
    pub file: String,
    /// Its report, or why there is none.
    pub report: Result<Report>,
}

/// Lays reports beside each other on one clock: each process is a phase of its own, labelled by its rank, that contains its
/// phases. Files that are missing, unreadable or of processes that did not end are listed with what is wrong.
///
/// An error only if no file could be read. Processes of one boot share the monotonic clock; others are placed by wall time,
/// and a note says so.
pub fn merge(parts: Vec<Part>) -> Result<Report> {
    let mut processes = Vec::new();
    let mut read = Vec::new();
    for part in parts {
        match part.report {
            Ok(report) => read.push((part.file, report)),
            Err(error) => processes.push(absent(part.file, &error)),
        }
    }
    let Some((_, first)) = read.iter().min_by_key(|(_, report)| report.clock.monotonic_origin) else {
        let why: Vec<_> = processes.iter().filter_map(|facts| facts.problem.clone()).collect();
        return Err(TimingError::Nothing(format!("there is nothing to merge: {}", why.join("; "))));
    };
    let one_boot = read.iter().all(|(_, report)| report.clock.boot_id == first.clock.boot_id)
        && !(first.clock.boot_id.is_empty() && read.len() > 1);
    let origin = |report: &Report| {
        if one_boot { report.clock.monotonic_origin } else { report.clock.unix_origin }
    };
    // By rank, then by the time they started.
    read.sort_by_key(|(_, report)| {
        (report.processes.first().and_then(|facts| facts.rank).unwrap_or(u32::MAX), origin(report))
    });
    let Some(earliest) = read.iter().map(|(_, report)| report).min_by_key(|report| origin(report)) else {
        return Err(TimingError::Nothing("there is nothing to merge".into()));
    };
    let mut merged = Report {
        complete: processes.is_empty() && read.iter().all(|(_, report)| report.complete),
        duration: 0,
        clock: earliest.clock.clone(),
        processes: Vec::new(),
        phases: Vec::new(),
        dropped: 0,
        environment: serde_json::Map::new(),
        notes: Vec::new(),
    };
    let start = origin(earliest);
    if !one_boot {
        merged
            .notes
            .push("processes of several boots or hosts: placed by wall time, as good as clocks agree".into());
    }
    for (file, report) in read {
        let offset = origin(&report).saturating_sub(start);
        append(&mut merged, &file, report, offset);
    }
    merged.processes.extend(processes);
    let mut ranks: Vec<_> = merged.processes.iter().filter_map(|facts| facts.rank).collect();
    ranks.sort_unstable();
    let mut twice: Vec<_> = ranks.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| pair[0]).collect();
    twice.dedup();
    merged.notes.extend(twice.iter().map(|rank| format!("more than one process has rank {rank}")));
    Ok(merged)
}

/// A process that left no readable file.
fn absent(file: String, error: &TimingError) -> ProcessFacts {
    let missing =
        matches!(error, TimingError::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound);
    let state = if missing { PartState::Missing } else { PartState::Unreadable };
    ProcessFacts { file: Some(file), state, problem: Some(error.to_string()), ..ProcessFacts::default() }
}

/// Adds a report, moved by `offset`, under phases for its processes.
fn append(merged: &mut Report, file: &str, report: Report, offset: u64) {
    let base = merged.processes.len();
    // A report of one process gets a phase that contains it; what was merged before has such phases.
    let single = report.processes.len() == 1;
    let state = if report.complete { PartState::Complete } else { PartState::Partial };
    for facts in &report.processes {
        let facts = facts.clone();
        let state = if single { state } else { facts.state };
        let problem = facts.problem.clone().or_else(|| {
            (state == PartState::Partial)
                .then(|| "the recording did not end: it runs still, or was killed".into())
        });
        let file = if single { Some(file.to_owned()) } else { facts.file.clone() };
        merged.processes.push(ProcessFacts { file, state, problem, ..facts });
    }
    let mut parent = None;
    if single && merged.phases.len() < MAX_PHASES {
        let id = PhaseId::at(merged.phases.len());
        let facts = &merged.processes[base];
        let failed =
            report.phases.iter().find(|phase| phase.parent.is_none() && phase.status == Status::Error);
        merged.phases.push(Phase {
            id,
            parent: None,
            outlived: None,
            name: cut(facts.label()),
            start: offset,
            duration: report.duration,
            status: match (report.complete, failed) {
                (false, _) => Status::Open,
                (true, Some(_)) => Status::Error,
                (true, None) => Status::Success,
            },
            error_type: failed.and_then(|phase| phase.error_type.clone()),
            thread: String::new(),
            process: base,
            counters: Amounts::new(),
            levels: Levels::new(),
            sync_before: 0,
            sync_inside: 0,
        });
        parent = Some(id);
    }
    let first = merged.phases.len() as u64;
    let room = MAX_PHASES - merged.phases.len();
    merged.dropped += report.dropped + report.phases.len().saturating_sub(room) as u64;
    let moved = |id: PhaseId| PhaseId(id.0 + first);
    merged.phases.extend(report.phases.into_iter().take(room).map(|phase| Phase {
        id: moved(phase.id),
        parent: phase.parent.map(moved).or(parent),
        outlived: phase.outlived.map(moved),
        start: phase.start.saturating_add(offset),
        process: phase.process + base,
        ..phase
    }));
    merged.duration = merged.duration.max(offset.saturating_add(report.duration));
    let label = merged.processes.get(base).map(ProcessFacts::label).unwrap_or_default();
    merged.notes.extend(report.notes.into_iter().map(|note| format!("{label}: {note}")));
    for (name, value) in report.environment {
        merged.environment.entry(name).or_insert(value);
    }
}
