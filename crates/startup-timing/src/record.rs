//! The record: which phases there are, who contains whom, and when each began and ended. Pure; it knows no clock, no thread
//! and no file.
//!
//! **A phase lies inside its parent, always.** One that is still open when its parent ends becomes a child of the parent's
//! parent, as processes do; one that is begun in a parent which has ended begins in the nearest ancestor that has not. Both
//! keep the phase they were asked for as `outlived`.

use std::collections::BTreeSet;

use crate::error::{Result, TimingError};
use crate::event::Event;
use crate::phase::{Amounts, Levels, Phase, PhaseId, Status};

/// The most phases of a recording; later ones are counted and dropped.
pub const MAX_PHASES: usize = 100_000;
/// The deepest nesting; phases below it are counted and dropped.
pub const MAX_DEPTH: usize = 128;
/// The longest name of a phase, thread, error or counter, in bytes; longer ones are cut.
pub const MAX_NAME_BYTES: usize = 256;

/// What is recorded so far.
#[derive(Debug, Clone, Default)]
pub struct Record {
    phases: Vec<Phase>,
    depths: Vec<usize>,
    open_children: Vec<BTreeSet<usize>>,
    last: u64,
    dropped: u64,
    closed: bool,
    environment: serde_json::Map<String, serde_json::Value>,
    notes: Vec<String>,
}

impl Record {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// The number that the next phase in `parent` gets, or `None` if it is beyond the limits and shall not be begun; it is
    /// then counted.
    pub fn admit(&mut self, parent: Option<PhaseId>) -> Result<Option<PhaseId>> {
        self.check_open()?;
        let depth = match self.open_ancestor(parent)? {
            Some(index) => self.depths[index] + 1,
            None => 0,
        };
        if self.phases.len() >= MAX_PHASES || depth >= MAX_DEPTH {
            self.dropped += 1;
            return Ok(None);
        }
        Ok(Some(PhaseId::at(self.phases.len())))
    }

    /// Adds what happened. Refused, it changes nothing.
    pub fn apply(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Begin { id, parent, name, at, thread, sync } => {
                self.begin(id, parent, name, at, thread, sync)
            }
            Event::End { id, at, status, error, counters, levels, sync } => {
                self.end(id, at, status, error, counters, levels, sync)
            }
            Event::Environment { facts } => {
                self.check_open()?;
                self.environment.extend(facts);
                Ok(())
            }
            Event::Note { text } => {
                self.notes.push(text);
                Ok(())
            }
            Event::Close { at, dropped } => {
                self.check_time(at)?;
                self.last = at;
                self.dropped = dropped;
                self.closed = true;
                Ok(())
            }
        }
    }

    /// The phases, in the order of their beginning; those still open end at `now`.
    pub fn phases(&self, now: u64) -> Vec<Phase> {
        let mut phases = self.phases.clone();
        for phase in phases.iter_mut().filter(|phase| phase.status == Status::Open) {
            phase.duration = now.max(self.last).saturating_sub(phase.start);
        }
        phases
    }

    /// The time of the last event.
    pub fn last(&self) -> u64 {
        self.last
    }

    /// Phases that were not recorded.
    pub fn dropped(&self) -> u64 {
        self.dropped
    }

    /// Whether the recording has ended.
    pub fn closed(&self) -> bool {
        self.closed
    }

    /// The facts that were added.
    pub fn environment(&self) -> &serde_json::Map<String, serde_json::Value> {
        &self.environment
    }

    /// The notes that were added.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    fn begin(
        &mut self,
        id: PhaseId,
        asked: Option<PhaseId>,
        name: String,
        at: u64,
        thread: String,
        sync: u64,
    ) -> Result<()> {
        self.check_time(at)?;
        let parent = self.open_ancestor(asked)?;
        let depth = parent.map_or(0, |index| self.depths[index] + 1);
        if id != PhaseId::at(self.phases.len()) || depth >= MAX_DEPTH || self.phases.len() >= MAX_PHASES {
            return Err(TimingError::UnknownPhase(id));
        }
        let index = self.phases.len();
        let parent_id = parent.map(PhaseId::at);
        self.last = at;
        self.phases.push(Phase {
            id,
            parent: parent_id,
            outlived: asked.filter(|_| asked != parent_id),
            name: cut(name),
            start: at,
            duration: 0,
            status: Status::Open,
            error_type: None,
            thread: cut(thread),
            process: 0,
            counters: Amounts::new(),
            levels: Levels::new(),
            sync_before: sync,
            sync_inside: 0,
        });
        self.depths.push(depth);
        self.open_children.push(BTreeSet::new());
        if let Some(parent) = parent {
            self.open_children[parent].insert(index);
        }
        Ok(())
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one event")]
    fn end(
        &mut self,
        id: PhaseId,
        at: u64,
        status: Status,
        error: Option<String>,
        counters: Amounts,
        levels: Levels,
        sync: u64,
    ) -> Result<()> {
        self.check_time(at)?;
        let index = self.index(id)?;
        if self.phases[index].status != Status::Open || status == Status::Open {
            return Err(TimingError::Ended(id));
        }
        self.last = at;
        let phase = &mut self.phases[index];
        phase.duration = at - phase.start;
        phase.status = status;
        phase.error_type = error.map(cut);
        phase.counters = counters.into_iter().map(|(name, amount)| (cut(name), amount)).collect();
        phase.levels = levels.into_iter().map(|(name, level)| (cut(name), level)).collect();
        phase.sync_inside = sync.min(phase.duration);
        let parent = phase.parent;
        let left = std::mem::take(&mut self.open_children[index]);
        if let Some(parent) = parent.and_then(PhaseId::index) {
            self.open_children[parent].remove(&index);
            self.open_children[parent].extend(&left);
        }
        for child in left {
            let child = &mut self.phases[child];
            child.outlived.get_or_insert(id);
            child.parent = parent;
        }
        Ok(())
    }

    /// The phase itself if it is open, else its nearest ancestor that is. An ended phase's parent was open when it ended
    /// and may have ended since.
    fn open_ancestor(&self, asked: Option<PhaseId>) -> Result<Option<usize>> {
        let Some(id) = asked else { return Ok(None) };
        let mut index = self.index(id)?;
        while self.phases[index].status != Status::Open {
            match self.phases[index].parent.and_then(PhaseId::index) {
                Some(parent) => index = parent,
                None => return Ok(None),
            }
        }
        Ok(Some(index))
    }

    fn index(&self, id: PhaseId) -> Result<usize> {
        id.index().filter(|&index| index < self.phases.len()).ok_or(TimingError::UnknownPhase(id))
    }

    fn check_open(&self) -> Result<()> {
        if self.closed { Err(TimingError::Closed) } else { Ok(()) }
    }

    fn check_time(&self, at: u64) -> Result<()> {
        self.check_open()?;
        if at < self.last { Err(TimingError::OutOfOrder { at, last: self.last }) } else { Ok(()) }
    }
}

/// A name that is not longer than names are.
pub(crate) fn cut(mut name: String) -> String {
    if name.len() > MAX_NAME_BYTES {
        let end = (0..=MAX_NAME_BYTES).rev().find(|&end| name.is_char_boundary(end)).unwrap_or(0);
        name.truncate(end);
    }
    name
}
