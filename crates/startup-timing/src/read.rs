//! Reads reports and the files of recordings that may not have ended. Nothing of a file is believed unchecked.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::clock::Clock;
use crate::error::{Result, TimingError};
use crate::event::Event;
use crate::phase::{Amounts, Levels, Phase, PhaseId, Status};
use crate::record::{MAX_DEPTH, MAX_NAME_BYTES, MAX_PHASES, Record};
use crate::report::{PartState, ProcessFacts, Report, SCHEMA, SCHEMA_VERSION};

/// The largest file that is read.
pub const MAX_FILE_BYTES: u64 = 256 << 20;
/// The longest time that is believed: three years, in nanoseconds.
const MAX_TIME: u64 = 100_000_000_000_000_000;
/// How far a child may stick out of its parent in a file that others wrote: rounding of seconds.
const SLACK: u64 = 1_000;
/// Processes of a merged report.
const MAX_PROCESSES: usize = 65_536;

/// Reads a file: a report, or the file that a recording wrote while it went on, however far that came.
pub fn read(path: &Path) -> Result<Report> {
    let io = |source| TimingError::Io { act: "read", path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    let mut bytes = Vec::new();
    file.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes).map_err(io)?;
    read_bytes(&bytes, &path.display().to_string())
}

/// Reads the bytes of such a file; `what` names them in errors.
pub fn read_bytes(bytes: &[u8], what: &str) -> Result<Report> {
    let foreign = |why: String| TimingError::Foreign { what: what.into(), why };
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let (bytes, limit) = (bytes.len() as u64, MAX_FILE_BYTES);
        return Err(TimingError::TooLarge { what: what.into(), bytes, limit });
    }
    // A file that was cut may end within a character; only its last line is lost by that.
    let valid = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let (valid, rest) = bytes.split_at(error.valid_up_to());
            if rest.contains(&b'\n') {
                return Err(foreign(format!("byte {} is not UTF-8", error.valid_up_to())));
            }
            std::str::from_utf8(valid).unwrap_or_default()
        }
    };
    if valid.trim().is_empty() {
        return Err(foreign("it is empty".into()));
    }
    let first = valid.lines().next().unwrap_or_default();
    let opening: Opening = match serde_json::from_str(first).or_else(|_| serde_json::from_str(valid)) {
        Ok(opening) => opening,
        Err(error) => return Err(foreign(error.to_string())),
    };
    if opening.schema.as_deref() != Some(SCHEMA) {
        return Err(foreign(format!(
            "its schema is {:?}, not {SCHEMA:?}",
            opening.schema.unwrap_or_default()
        )));
    }
    match opening.schema_version {
        Some(version) if version > SCHEMA_VERSION => {
            return Err(TimingError::Newer { what: what.into(), version, known: SCHEMA_VERSION });
        }
        Some(1..) => {}
        _ => return Err(foreign("it has no schema version".into())),
    }
    if opening.kind.as_deref() == Some(RECORDING) {
        recording(valid, what)
    } else {
        let found: Found = serde_json::from_str(valid).map_err(|error| foreign(error.to_string()))?;
        found.report().map_err(foreign)
    }
}

/// The `kind` of a recording's file.
pub(crate) const RECORDING: &str = "recording";

#[derive(Deserialize)]
struct Opening {
    schema: Option<String>,
    schema_version: Option<u64>,
    kind: Option<String>,
}

/// The first line of a recording's file.
#[derive(Debug, Deserialize)]
struct Head {
    clock: Clock,
    process: ProcessFacts,
}

/// Plays the lines of a recording again. The last one may be cut.
fn recording(text: &str, what: &str) -> Result<Report> {
    let foreign = |line: usize, why: String| TimingError::Foreign {
        what: what.into(),
        why: format!("line {}: {why}", line + 1),
    };
    let mut lines = text.split_inclusive('\n').enumerate();
    let head: Head = match lines.next() {
        Some((line, first)) => {
            serde_json::from_str(first).map_err(|error| foreign(line, error.to_string()))?
        }
        None => return Err(foreign(0, "it is empty".into())),
    };
    let mut record = Record::new();
    let mut cut = false;
    for (line, text) in lines {
        match serde_json::from_str::<Event>(text) {
            Ok(event) => {
                check_event(&event).map_err(|why| foreign(line, why))?;
                record.apply(event).map_err(|error| foreign(line, error.to_string()))?;
            }
            Err(_) if !text.ends_with('\n') => cut = true,
            Err(error) => return Err(foreign(line, error.to_string())),
        }
    }
    let mut report = finished(&record, head.clock, head.process, record.last());
    if cut {
        report.notes.push("the file ends within a line: the process was killed, or the disk was full".into());
    }
    Ok(report)
}

/// The report of a record at some time.
pub(crate) fn finished(record: &Record, clock: Clock, process: ProcessFacts, now: u64) -> Report {
    let state = if record.closed() { PartState::Complete } else { PartState::Partial };
    let now = if record.closed() { record.last() } else { now.max(record.last()) };
    Report {
        complete: record.closed(),
        duration: now,
        clock,
        processes: vec![ProcessFacts { state, ..process }],
        phases: record.phases(now),
        dropped: record.dropped(),
        environment: record.environment().clone(),
        notes: record.notes().to_vec(),
    }
}

fn check_event(event: &Event) -> Result<(), String> {
    let (at, sync) = match event {
        Event::Begin { at, sync, .. } | Event::End { at, sync, .. } => (*at, *sync),
        Event::Close { at, .. } => (*at, 0),
        Event::Environment { .. } | Event::Note { .. } => (0, 0),
    };
    if at.max(sync) > MAX_TIME { Err(format!("{} ns is no time of a start", at.max(sync))) } else { Ok(()) }
}

/// A report as its JSON has it, less what can be worked out.
#[derive(Deserialize)]
struct Found {
    complete: bool,
    duration: f64,
    #[serde(default)]
    dropped: u64,
    clock: Clock,
    processes: Vec<ProcessFacts>,
    #[serde(default)]
    environment: Map<String, Value>,
    #[serde(default)]
    notes: Vec<String>,
    phases: Vec<FoundPhase>,
}

#[derive(Deserialize)]
struct FoundPhase {
    id: PhaseId,
    parent_id: Option<PhaseId>,
    name: String,
    start_offset: f64,
    duration: f64,
    status: Status,
    #[serde(default)]
    error_type: Option<String>,
    #[serde(default)]
    thread: String,
    #[serde(default)]
    process: usize,
    #[serde(default)]
    outlived: Option<PhaseId>,
    #[serde(default)]
    sync_before: f64,
    #[serde(default)]
    sync_inside: f64,
    #[serde(default)]
    counters: Amounts,
    #[serde(default)]
    levels: Levels,
}

impl Found {
    fn report(self) -> Result<Report, String> {
        let duration = nanoseconds(self.duration, "the duration")?;
        if self.phases.len() > MAX_PHASES || self.processes.len() > MAX_PROCESSES {
            return Err(format!(
                "{} phases of {} processes are too many",
                self.phases.len(),
                self.processes.len()
            ));
        }
        let mut phases: Vec<Phase> = Vec::with_capacity(self.phases.len());
        let mut depths: Vec<usize> = Vec::with_capacity(self.phases.len());
        for (index, found) in self.phases.into_iter().enumerate() {
            if found.id != PhaseId::at(index) {
                return Err(format!("phase {} stands at place {}", found.id, index + 1));
            }
            let phase = found.phase()?;
            let (within, depth) = match phase.parent {
                None => (0..duration, 0),
                Some(id) => {
                    let parent = id.index().and_then(|parent| phases.get(parent).zip(depths.get(parent)));
                    let (parent, depth) =
                        parent.ok_or_else(|| format!("phase {} comes before its parent {id}", phase.id))?;
                    (parent.start..parent.end(), depth + 1)
                }
            };
            if phase.start.saturating_add(SLACK) < within.start
                || phase.end() > within.end.saturating_add(SLACK)
            {
                return Err(format!("phase {} does not lie inside what contains it", phase.id));
            }
            if phase.process >= self.processes.len() || depth >= MAX_DEPTH {
                return Err(format!("phase {} has no process, or lies too deep", phase.id));
            }
            phases.push(phase);
            depths.push(depth);
        }
        let Self { complete, dropped, clock, processes, environment, notes, .. } = self;
        Ok(Report { complete, duration, clock, processes, phases, dropped, environment, notes })
    }
}

impl FoundPhase {
    fn phase(self) -> Result<Phase, String> {
        let long = [&self.name, &self.thread].iter().any(|text| text.len() > MAX_NAME_BYTES);
        if long || self.error_type.as_ref().is_some_and(|text| text.len() > MAX_NAME_BYTES) {
            return Err(format!("a name of phase {} is longer than {MAX_NAME_BYTES} bytes", self.id));
        }
        Ok(Phase {
            id: self.id,
            parent: self.parent_id,
            outlived: self.outlived,
            name: self.name,
            start: nanoseconds(self.start_offset, "a start")?,
            duration: nanoseconds(self.duration, "a duration")?,
            status: self.status,
            error_type: self.error_type,
            thread: self.thread,
            process: self.process,
            counters: self.counters,
            levels: self.levels,
            sync_before: nanoseconds(self.sync_before, "a synchronization")?,
            sync_inside: nanoseconds(self.sync_inside, "a synchronization")?,
        })
    }
}

fn nanoseconds(seconds: f64, what: &str) -> Result<u64, String> {
    let nanoseconds = (seconds * 1e9).round();
    if !(0.0..=MAX_TIME as f64).contains(&nanoseconds) {
        return Err(format!("{what} is {seconds} s"));
    }
    #[expect(clippy::cast_sign_loss, reason = "checked above")]
    Ok(nanoseconds as u64)
}
