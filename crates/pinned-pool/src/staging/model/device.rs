//! A device in plain data: slots, streams, and what is wrong with what it was told to do.

use std::collections::BTreeMap;

use crate::staging::queue::{LineId, Step};

/// Whose bytes a slot holds: line, job and chunk. Nobody's while they are being read.
pub(super) type Content = Option<(LineId, u64, usize)>;

/// The streams of a device, one a line.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub(super) struct World {
    pub(super) slots: Vec<Content>,
    streams: BTreeMap<LineId, Stream>,
    pub(super) wrong: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Stream {
    /// What was submitted and has not run.
    waiting: Vec<(u64, Step)>,
    /// The latest submitted: job, and how far in it: 1 for its beginning, 2 for its first chunk …
    last: Option<(u64, usize)>,
    ended: Vec<u64>,
    /// The job that begins next, none left out.
    next: u64,
}

impl World {
    pub(super) fn new(slots: u32) -> Self {
        Self { slots: vec![None; slots as usize], ..Self::default() }
    }

    /// A thread begins to read a chunk: what the slot held is gone.
    pub(super) fn begin_fill(&mut self, slot: u32) {
        self.slots[slot as usize] = None;
    }

    pub(super) fn filled(&mut self, slot: u32, content: Content) {
        self.slots[slot as usize] = content;
    }

    /// A step is submitted; `chunks` are those of its job.
    pub(super) fn submit(&mut self, line: LineId, job: u64, step: Step, chunks: usize) {
        let stream = self.streams.entry(line).or_default();
        let place = match step {
            Step::Begin => 1,
            Step::Copy { chunk, .. } => 2 + chunk,
            Step::End => 2 + chunks,
        };
        let follows = match stream.last {
            Some((last, at)) if last == job => place == at + 1,
            // The job before has ended, or has failed on the way, but has begun.
            _ => place == 1 && job == stream.next,
        };
        stream.next = stream.next.max(job + 1);
        if !follows {
            self.wrong.push(format!("line {line}: {step:?} of job {job} follows {:?}", stream.last));
        }
        stream.last = Some((job, place));
        stream.waiting.push((job, step));
        if step == Step::End {
            stream.ended.push(job);
        }
    }

    /// All has been waited for: jobs before this one need not begin.
    pub(super) fn forgive(&mut self, line: LineId, job: u64) {
        self.streams.entry(line).or_default().next = job;
    }

    /// Whether a job's record is on the stream.
    pub(super) fn has_ended(&self, line: LineId, job: u64) -> bool {
        self.streams.get(&line).is_some_and(|stream| stream.ended.contains(&job))
    }

    /// Lines on whose stream something can run.
    pub(super) fn runnable(&self) -> Vec<LineId> {
        let waits = |(&line, stream): (&LineId, &Stream)| (!stream.waiting.is_empty()).then_some(line);
        self.streams.iter().filter_map(waits).collect()
    }

    /// Runs the oldest step of a stream.
    pub(super) fn run(&mut self, line: LineId) {
        let Some(stream) = self.streams.get_mut(&line).filter(|stream| !stream.waiting.is_empty()) else {
            return;
        };
        let (job, step) = stream.waiting.remove(0);
        if let Step::Copy { chunk, slot } = step {
            let holds = self.slots[slot as usize];
            if holds != Some((line, job, chunk)) {
                self.wrong
                    .push(format!("line {line}: chunk {chunk} of job {job} read {holds:?} in slot {slot}"));
            }
        }
    }

    /// Whether no submitted copy reads a slot.
    pub(super) fn is_reached(&self, slot: u32) -> bool {
        let reads = |step: &(u64, Step)| matches!(step.1, Step::Copy { slot: read, .. } if read == slot);
        !self.streams.values().any(|stream| stream.waiting.iter().any(reads))
    }
}
