//! The recorder: a record, a clock and, if asked for, a file that is written while the recording goes on.
//!
//! Parents are said, never guessed: a phase begins in the span or handle it is asked of, on whatever thread. Nothing here fails
//! the program that is measured: what cannot be recorded is left out and noted.

use std::collections::HashMap;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::clock::{Clock, process_age};
use crate::error::{Result, TimingError};
use crate::event::Event;
use crate::phase::{Amounts, Levels, PhaseId, Status};
use crate::process::Sample;
use crate::read::{RECORDING, finished};
use crate::record::{Record, cut};
use crate::report::{ProcessFacts, Report, SCHEMA, SCHEMA_VERSION};

/// How to record.
#[derive(Debug, Clone, Default)]
pub struct RecorderOptions {
    /// Write every event to this file as it happens, so that a killed process leaves what it did.
    pub path: Option<PathBuf>,
    /// Read the system's counters at the beginning and end of each phase.
    pub counters: bool,
    /// The rank of this process among the workers.
    pub rank: Option<u32>,
    /// What this process is called.
    pub name: String,
}

/// How a phase ended.
#[derive(Debug, Clone, Default)]
pub struct Ending {
    /// The type of the error that ended it; `None` for success.
    pub error: Option<String>,
    /// What happened in it, beside what the system counts.
    pub counters: Amounts,
    /// What was there before and after, beside what the system says.
    pub levels: Levels,
    /// Nanoseconds of synchronization just before its end.
    pub sync: u64,
}

/// Records phases, or nothing at all: then beginning and ending one costs a few nanoseconds.
#[derive(Debug, Clone)]
pub struct Recorder(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    clock: Clock,
    process: ProcessFacts,
    counters: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    record: Record,
    /// The counters at the beginning of open phases.
    samples: HashMap<PhaseId, Sample>,
    file: Option<(File, PathBuf)>,
}

impl Recorder {
    /// Starts recording. Fails only if the file cannot be created.
    pub fn new(options: RecorderOptions) -> Result<Self> {
        let clock = Clock::start();
        let process = ProcessFacts {
            pid: std::process::id(),
            rank: options.rank,
            name: cut(options.name),
            age: process_age(),
            ..ProcessFacts::default()
        };
        let file = options.path.map(|path| open(path, &clock, &process)).transpose()?;
        let state = State { record: Record::new(), samples: HashMap::new(), file };
        Ok(Self(Some(Arc::new(Inner {
            clock,
            process,
            counters: options.counters,
            state: Mutex::new(state),
        }))))
    }

    /// One that records nothing.
    pub const fn off() -> Self {
        Self(None)
    }

    /// Whether it records, in this process: a forked child has a copy of its parent's, which nobody would read.
    pub fn is_on(&self) -> bool {
        self.inner().is_some()
    }

    /// Begins a phase that lies in no other.
    pub fn phase(&self, name: &str) -> Span {
        self.phase_in(name, None)
    }

    /// Begins a phase in one of this recorder's, by its number, on any thread.
    pub fn phase_in(&self, name: &str, parent: Option<PhaseId>) -> Span {
        if self.0.is_none() {
            return Span { recorder: Self(None), id: None, ending: None };
        }
        let thread = std::thread::current();
        let id = self.begin(name, parent, thread.name().unwrap_or("thread"), 0).ok().flatten();
        // What lies in a phase that is not recorded is not either: it would have the wrong parent.
        let recorder = if id.is_some() { self.clone() } else { Self(None) };
        Span { recorder, id, ending: None }
    }

    /// Begins a phase, for those who keep its number themselves. `sync` nanoseconds were spent waiting for a device before.
    ///
    /// `None` if nothing is recorded: off, a forked child, or beyond the limits.
    pub fn begin(
        &self,
        name: &str,
        parent: Option<PhaseId>,
        thread: &str,
        sync: u64,
    ) -> Result<Option<PhaseId>> {
        let Some(inner) = self.inner() else { return Ok(None) };
        let sample = inner.counters.then(Sample::take);
        let mut state = inner.lock();
        let Some(id) = state.record.admit(parent)? else { return Ok(None) };
        let (name, thread) = (cut(name.into()), cut(thread.into()));
        // The clock last: what recording itself takes is not in the phase.
        let at = inner.clock.now().max(state.record.last());
        state.add(Event::Begin { id, parent, name, at, thread, sync })?;
        if let Some(sample) = sample {
            state.samples.insert(id, sample);
        }
        Ok(Some(id))
    }

    /// Ends a phase that `begin` began.
    pub fn end(&self, id: PhaseId, ending: Ending) -> Result<()> {
        let Some(inner) = self.inner() else { return Ok(()) };
        let at = inner.clock.now();
        let sample = inner.counters.then(Sample::take);
        let Ending { error, mut counters, mut levels, sync } = ending;
        let mut state = inner.lock();
        if let (Some(start), Some(end)) = (state.samples.remove(&id), sample) {
            counters.extend(start.amounts(&end));
            levels.extend(start.levels(&end));
        }
        let at = at.max(state.record.last());
        let status = if error.is_some() { Status::Error } else { Status::Success };
        state.add(Event::End { id, at, status, error: error.map(cut), counters, levels, sync })
    }

    /// Adds facts about machine and program.
    pub fn environment(&self, facts: serde_json::Map<String, serde_json::Value>) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.lock().add(Event::Environment { facts }))
    }

    /// Notes something about the recording itself.
    pub fn note(&self, text: impl Into<String>) -> Result<()> {
        self.inner().map_or(Ok(()), |inner| inner.lock().add(Event::Note { text: text.into() }))
    }

    /// The report so far, or the whole one after the end; `None` if nothing is recorded.
    pub fn report(&self) -> Option<Report> {
        let inner = self.inner()?;
        let state = inner.lock();
        Some(finished(&state.record, inner.clock.clone(), inner.process.clone(), inner.clock.now()))
    }

    /// Nanoseconds since the recording began; `None` if nothing is recorded.
    pub fn now(&self) -> Option<u64> {
        self.inner().map(|inner| inner.clock.now())
    }

    /// Ends the recording and gives its report. Phases still open stay so in it. A second call gives the same report.
    pub fn finish(&self) -> Option<Report> {
        self.finish_at(self.now()?)
    }

    /// Ends the recording as of a time that [`Recorder::now`] gave, or of its last event: what was gathered for the report
    /// since then is not in its duration.
    pub fn finish_at(&self, at: u64) -> Option<Report> {
        let inner = self.inner()?;
        let mut state = inner.lock();
        if !state.record.closed() {
            let (at, dropped) = (at.max(state.record.last()), state.record.dropped());
            // It is open, and time goes on: it cannot be refused.
            let _ = state.add(Event::Close { at, dropped });
            state.file = None;
        }
        drop(state);
        self.report()
    }

    fn inner(&self) -> Option<&Inner> {
        self.0.as_deref().filter(|inner| inner.process.pid == std::process::id())
    }
}

impl Inner {
    /// Whoever panicked while holding it left it whole: every change is one event.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Adds an event to the record and then to the file. A file that cannot be written to any more is given up and noted.
    fn add(&mut self, event: Event) -> Result<()> {
        let line = self.file.is_some().then(|| line(&event));
        self.record.apply(event)?;
        if let (Some((file, path)), Some(line)) = (&mut self.file, line)
            && let Err(error) = file.write_all(&line)
        {
            let text = format!("{} was not written to the end: {error}", path.display());
            self.file = None;
            self.record.apply(Event::Note { text })?;
        }
        Ok(())
    }
}

fn line(value: &impl serde::Serialize) -> Vec<u8> {
    let mut line = serde_json::to_vec(value).unwrap_or_default();
    line.push(b'\n');
    line
}

/// Creates the file and writes its first line. Each line is one write, which the system keeps even if the process is killed.
fn open(path: PathBuf, clock: &Clock, process: &ProcessFacts) -> Result<(File, PathBuf)> {
    let head = serde_json::json!({
        "schema": SCHEMA, "schema_version": SCHEMA_VERSION, "kind": RECORDING, "clock": clock, "process": process,
    });
    let created = File::create(&path).and_then(|mut file| file.write_all(&line(&head)).map(|()| file));
    match created {
        Ok(file) => Ok((file, path)),
        Err(source) => Err(TimingError::Io { act: "write", path, source }),
    }
}

/// An open phase. It ends with [`Span::finish`] or [`Span::fail`]; one that is only dropped ended by an early return or a panic,
/// which is an error.
#[derive(Debug)]
#[must_use = "a phase that is dropped at once measures nothing"]
pub struct Span {
    recorder: Recorder,
    id: Option<PhaseId>,
    /// Kept apart: most phases have nothing to add.
    ending: Option<Box<Ending>>,
}

impl Span {
    /// Its number, for [`Recorder::phase_in`] on another thread; `None` if it is not recorded.
    pub fn id(&self) -> Option<PhaseId> {
        self.id
    }

    /// Begins a phase in this one, on any thread.
    pub fn phase(&self, name: &str) -> Self {
        self.recorder.phase_in(name, self.id)
    }

    /// Adds to an amount of this phase, such as bytes read.
    pub fn count(&mut self, name: &str, amount: i64) {
        if self.id.is_some() {
            let counters = &mut self.ending.get_or_insert_default().counters;
            let sum = counters.entry(name.into()).or_insert(Some(0));
            *sum = sum.map(|sum| sum.saturating_add(amount));
        }
    }

    /// Says what was there before and after this phase, such as memory of a device.
    pub fn level(&mut self, name: &str, before: Option<i64>, after: Option<i64>) {
        if self.id.is_some() {
            self.ending.get_or_insert_default().levels.insert(name.into(), (before, after));
        }
    }

    /// Runs `work` and ends the phase as it ends: with success, or with the error's type.
    pub fn run<T, E>(self, work: impl FnOnce(&Self) -> Result<T, E>) -> Result<T, E> {
        match work(&self) {
            Ok(value) => {
                self.finish();
                Ok(value)
            }
            Err(error) => {
                self.fail(std::any::type_name::<E>());
                Err(error)
            }
        }
    }

    /// Ends it with success.
    pub fn finish(mut self) {
        self.close(None);
    }

    /// Ends it with an error of this type.
    pub fn fail(mut self, error_type: &str) {
        self.close(Some(error_type));
    }

    fn close(&mut self, error: Option<&str>) {
        let Some(id) = self.id.take() else { return };
        let ending = self.ending.take().map(|ending| *ending).unwrap_or_default();
        // The recording may have ended before this phase, which then stays open in its report.
        let _ = self.recorder.end(id, Ending { error: error.map(Into::into), ..ending });
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        let error = if std::thread::panicking() { "panic" } else { "dropped" };
        self.close(Some(error));
    }
}
