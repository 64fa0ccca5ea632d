//! The words of the queue: steps, turns, jobs and lines.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, VecDeque};

use crate::error::HostError;

/// Which line of work.
pub(in crate::staging) type LineId = u64;

/// A chunk being brought to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::staging) struct Place {
    pub(in crate::staging) line: LineId,
    /// The job's number in its line.
    pub(in crate::staging) job: u64,
    pub(in crate::staging) chunk: usize,
    pub(in crate::staging) slot: u32,
}

/// What is submitted to a line's stream next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::staging) enum Step {
    /// The job's waits, and what needs no slot.
    Begin,
    /// A filled chunk.
    Copy { chunk: usize, slot: u32 },
    /// The record behind the last chunk.
    End,
}

/// A step of a job, being submitted by one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::staging) struct Turn {
    pub(in crate::staging) line: LineId,
    /// The job's number in its line.
    pub(in crate::staging) job: u64,
    pub(in crate::staging) step: Step,
}

/// A slot submitted once: what is asked about one flight must not be taken for an answer about the slot's next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::staging) struct Flight {
    pub(in crate::staging) slot: u32,
    /// How often the slot was submitted before.
    pub(in crate::staging) number: u64,
}

/// What has become of a slot whose copy was to be submitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::staging) enum Fate {
    /// The device may read it until its mark is reached.
    Flying,
    /// Nothing of it was submitted, or all of it has run.
    Unused,
    /// Nobody can tell: it is never used again.
    Lost,
}

/// What a thread does next.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::staging) enum Next<J> {
    /// Read a chunk into its slot, then report with [`Queue::filled`].
    Fill(Place, J),
    /// Submit, then report with [`Queue::submitted`].
    Submit(Turn, J),
    /// Drop a job that has failed, then report with [`Queue::done`].
    Drop(LineId, J),
    /// Ask whether any of these slots, the oldest of each line, was reached; then report with [`Queue::polled`].
    Poll(Vec<Flight>),
    /// Nothing, until something changes.
    Idle,
    /// End the thread.
    Stop,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Job<J> {
    pub(super) number: u64,
    pub(super) work: J,
    pub(super) chunks: usize,
    pub(super) begun: bool,
    /// It has failed before its beginning was submitted, which it still has to: what follows relies on its waits.
    pub(super) dead: bool,
    /// Chunks that were submitted, or are being.
    pub(super) submitted: usize,
    /// Chunks given to threads behind those: the slot of those that are filled.
    pub(super) ready: VecDeque<Option<u32>>,
}

impl<J> Job<J> {
    /// The next chunk to be given to a thread.
    pub(super) fn unassigned(&self) -> Option<usize> {
        Some(self.submitted + self.ready.len()).filter(|&chunk| chunk < self.chunks)
    }

    pub(super) fn step(&self) -> Option<Step> {
        if !self.begun {
            return Some(Step::Begin);
        }
        if self.submitted == self.chunks {
            return Some(Step::End);
        }
        self.ready.front().copied().flatten().map(|slot| Step::Copy { chunk: self.submitted, slot })
    }
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(super) struct Line<J> {
    pub(super) jobs: VecDeque<Job<J>>,
    /// The number of the next job.
    pub(super) next: u64,
    /// A thread is submitting to this line's stream.
    pub(super) submitting: bool,
    /// Threads that do something for this line and may hold a job of it.
    pub(super) busy: u32,
    /// Slots submitted and not known to be reached, the oldest first.
    pub(super) flying: VecDeque<Flight>,
    /// Slots filled or being filled.
    pub(super) taken: u32,
    /// Why jobs failed, until somebody asks.
    pub(super) failures: BTreeMap<u64, HostError>,
    /// Why waits may be missing from the stream: nothing is submitted any more until all is taken back.
    pub(super) broken: Option<HostError>,
}

impl<J> Line<J> {
    pub(super) fn slots(&self) -> usize {
        self.taken as usize + self.flying.len()
    }

    pub(super) fn wants(&self) -> Option<usize> {
        self.jobs.iter().position(|job| job.unassigned().is_some())
    }
}

/// A deliberate mistake, which the tests must notice.
#[cfg(test)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::staging) enum Mutant {
    /// A slot is free once its copy was submitted.
    ReuseEarly,
    /// A job ends before its last chunk is submitted.
    EndEarly,
    /// Chunks are submitted as they are filled, before the job's waits.
    SkipBegin,
    /// A line's jobs are submitted by several threads at once.
    SubmitTogether,
    /// A wait for submission is over when the job's last chunk was given to a thread.
    WaitShort,
    /// A job that cannot be read does not begin.
    DropWaits,
    /// An answer about a slot is taken for any flight of it.
    StaleAnswer,
}
