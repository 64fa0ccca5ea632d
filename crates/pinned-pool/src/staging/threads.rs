//! The threads behind a ring: all of them share one [`Queue`] under one lock, and do outside it whatever takes time.
//!
//! Every change that may let somebody go on wakes everybody: there are a handful of threads and a few hundred changes a
//! second, and a wake-up that could be lost is the one bug this module must not have (the model checker's tests look
//! for it).
//!
//! **No deadlock.** A thread holds the lock for bookkeeping only and never calls out under it: jobs are dropped outside
//! it, since what they keep alive may take any lock when it goes. What a thread waits for is a read, or the device
//! reaching marks behind copies that are submitted; those wait for events that were recorded before, never for what a
//! caller has yet to do.
#![forbid(unsafe_code)]

use std::fmt::Debug;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::queue::{Fate, Flight, LineId, Next, Queue, Step};
use super::sync::{Arc, Condvar, Mutex, MutexGuard, lock, thread, wait};
use crate::error::{HostError, Result};

/// What threads do with jobs. Nothing here may wait for a caller of the ring.
pub(super) trait Device: Send + Sync + 'static {
    /// A piece of work for one line.
    type Job: Clone + Debug + Send + 'static;

    /// Reads a chunk into a slot.
    fn fill(&self, job: &Self::Job, chunk: usize, slot: u32) -> Result<()>;
    /// Submits what comes before the chunks.
    fn begin(&self, job: &Self::Job) -> Result<()>;
    /// Submits a chunk and marks its end; and what has become of the slot, also on an error.
    fn copy(&self, job: &Self::Job, chunk: usize, slot: u32) -> (Fate, Result<()>);
    /// Submits the record behind the chunks.
    fn end(&self, job: &Self::Job) -> Result<()>;
    /// Whether the mark behind a slot's copy was reached. Never blocks.
    fn is_reached(&self, slot: u32) -> Result<bool>;
    /// Waits a little, the longer the more rounds nothing was reached.
    fn pause(&self, round: u32);
    /// The device may read slots for ever: their memory is never to be given back.
    fn abandon(&mut self);
}

#[derive(Debug)]
struct Shared<D: Device> {
    queue: Mutex<Queue<D::Job>>,
    changed: Condvar,
    device: D,
}

/// The threads of one ring.
#[derive(Debug)]
pub(super) struct Threads<D: Device> {
    shared: Arc<Shared<D>>,
    handles: Mutex<Vec<thread::JoinHandle<()>>>,
}

impl<D: Device> Threads<D> {
    /// Starts `count` threads over `slots` slots.
    pub(super) fn start(device: D, slots: u32, count: usize) -> io::Result<Self> {
        Self::of(Queue::new(slots), device, count)
    }

    pub(super) fn of(queue: Queue<D::Job>, device: D, count: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared { queue: Mutex::new(queue), changed: Condvar::new(), device });
        let threads = Self { shared, handles: Mutex::new(Vec::with_capacity(count)) };
        for index in 0..count {
            let shared = Arc::clone(&threads.shared);
            let spawned =
                thread::Builder::new().name(format!("staging-{index}")).spawn(move || shared.serve());
            match spawned {
                Ok(handle) => lock(&threads.handles).push(handle),
                // A machine short of threads is served by fewer.
                Err(error) if index == 0 => return Err(error),
                Err(error) => tracing::debug!(%error, threads = index, "the staging ring has fewer threads"),
            }
        }
        Ok(threads)
    }

    pub(super) fn device(&self) -> &D {
        &self.shared.device
    }

    pub(super) fn count(&self) -> usize {
        lock(&self.handles).len()
    }

    pub(super) fn add_line(&self) -> LineId {
        self.queue().add_line()
    }

    /// Gives a job to a line; its number.
    pub(super) fn submit(&self, line: LineId, job: D::Job, chunks: usize) -> Result<u64> {
        let number = self.queue().submit(line, job, chunks)?;
        self.shared.changed.notify_all();
        Ok(number)
    }

    /// Blocks until a job was submitted or failed; also whether that took any waiting.
    pub(super) fn wait(&self, line: LineId, number: u64) -> (Result<()>, bool) {
        let mut queue = self.queue();
        let mut waited = false;
        loop {
            if let Some(outcome) = queue.outcome(line, number) {
                return (outcome, waited);
            }
            waited = true;
            queue = wait(&self.shared.changed, queue);
        }
    }

    /// Whether everything given to a line was submitted.
    pub(super) fn is_clear(&self, line: LineId) -> bool {
        self.queue().is_clear(line)
    }

    /// Whether others may submit to a line's stream now.
    pub(super) fn is_open(&self, line: LineId) -> bool {
        self.queue().is_open(line)
    }

    /// Blocks until everything given to a line was submitted or has failed.
    pub(super) fn wait_clear(&self, line: LineId) {
        let mut queue = self.queue();
        while !queue.is_clear(line) {
            queue = wait(&self.shared.changed, queue);
        }
    }

    /// Takes back what was given to a line and not submitted. Blocks until no thread is at work for it.
    pub(super) fn cancel(&self, line: LineId) {
        let mut queue = self.queue();
        let jobs = loop {
            match queue.cancel(line) {
                Some(jobs) => break jobs,
                None => queue = wait(&self.shared.changed, queue),
            }
        };
        drop(queue);
        drop(jobs);
        let mut queue = self.queue();
        while queue.is_busy(line) {
            queue = wait(&self.shared.changed, queue);
        }
        queue.mend(line);
    }

    /// Asks the device which slots of a line it has done with. Never blocks.
    pub(super) fn reap(&self, line: LineId) {
        let flying = self.queue().flying(line);
        let (reached, lost) = self.shared.ask(&flying);
        self.queue().land(&reached, &lost);
        self.shared.changed.notify_all();
    }

    /// Whether the device may still read slots of a line.
    pub(super) fn is_flying(&self, line: LineId) -> bool {
        !self.queue().flying(line).is_empty()
    }

    /// Ends a line. What it had to do is not done.
    pub(super) fn remove_line(&self, line: LineId) {
        let jobs = self.queue().remove_line(line);
        drop(jobs);
        self.shared.changed.notify_all();
    }

    /// Ends the threads without waiting for them.
    pub(super) fn stop(&self) {
        self.queue().stop();
        self.shared.changed.notify_all();
    }

    /// Ends the threads and blocks until they have, and until the device has done with the slots it will tell about.
    pub(super) fn join(&self) {
        self.stop();
        for handle in lock(&self.handles).drain(..) {
            if handle.join().is_err() {
                tracing::error!("a thread of the staging ring panicked");
            }
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue<D::Job>> {
        lock(&self.shared.queue)
    }
}

/// Without [`Threads::join`], the last thread to end gives the memory back.
impl<D: Device> Drop for Threads<D> {
    fn drop(&mut self) {
        self.stop();
    }
}

impl<D: Device> Shared<D> {
    /// The life of a thread.
    fn serve(&self) {
        let mut round = 0;
        let mut queue = lock(&self.queue);
        loop {
            match queue.next() {
                Next::Stop => break,
                Next::Idle => queue = wait(&self.changed, queue),
                Next::Fill(place, job) => {
                    drop(queue);
                    let filled = guarded(|| self.device.fill(&job, place.chunk, place.slot));
                    drop(job);
                    queue = self.report(place.line, |queue| queue.filled(place, filled));
                }
                Next::Submit(turn, job) => {
                    drop(queue);
                    let (fate, submitted) = self.submit(turn.step, &job);
                    drop(job);
                    queue = self.report(turn.line, |queue| queue.submitted(turn, fate, submitted));
                }
                Next::Drop(line, job) => {
                    drop(queue);
                    drop(job);
                    queue = self.report(line, |_| None);
                }
                Next::Poll(slots) => {
                    drop(queue);
                    let (reached, lost) = self.ask(&slots);
                    round = if reached.is_empty() && lost.is_empty() { round + 1 } else { 0 };
                    if round > 0 {
                        self.device.pause(round);
                    }
                    queue = lock(&self.queue);
                    queue.polled(&reached, &lost);
                    if round == 0 {
                        self.changed.notify_all();
                    }
                }
            }
        }
        drop(queue);
        // So that whoever lets go of the ring last need not wait.
        self.settle();
    }

    fn submit(&self, step: Step, job: &D::Job) -> (Fate, Result<()>) {
        match step {
            Step::Begin => (Fate::Unused, guarded(|| self.device.begin(job))),
            Step::End => (Fate::Unused, guarded(|| self.device.end(job))),
            Step::Copy { chunk, slot } => {
                let copied = catch_unwind(AssertUnwindSafe(|| self.device.copy(job, chunk, slot)));
                copied.unwrap_or((Fate::Lost, Err(HostError::StagingStopped)))
            }
        }
    }

    /// Reports what was done for a line, and drops a job that this ended before anybody can see that it has.
    fn report(
        &self,
        line: LineId,
        report: impl FnOnce(&mut Queue<D::Job>) -> Option<D::Job>,
    ) -> MutexGuard<'_, Queue<D::Job>> {
        let mut queue = lock(&self.queue);
        if let Some(ended) = report(&mut queue) {
            drop(queue);
            drop(ended);
            queue = lock(&self.queue);
        }
        queue.done(line);
        self.changed.notify_all();
        queue
    }

    /// Which of these slots the device has done with, and of which it cannot tell.
    fn ask(&self, flights: &[Flight]) -> (Vec<Flight>, Vec<(Flight, HostError)>) {
        let (mut reached, mut lost) = (Vec::new(), Vec::new());
        for &flight in flights {
            // A refusal may pass.
            let ask = || self.device.is_reached(flight.slot);
            match ask().or_else(|_| ask()) {
                Ok(true) => reached.push(flight),
                Ok(false) => {}
                Err(error) => lost.push((flight, error)),
            }
        }
        (reached, lost)
    }

    /// Blocks until no slot is flying.
    fn settle(&self) {
        let mut round = 0;
        loop {
            let flying = lock(&self.queue).all_flying();
            if flying.is_empty() {
                return;
            }
            let (reached, lost) = self.ask(&flying);
            lock(&self.queue).land(&reached, &lost);
            round += 1;
            self.device.pause(round);
        }
    }
}

/// Every thread has settled before it let go, so that nothing flies here but what was lost.
impl<D: Device> Drop for Shared<D> {
    fn drop(&mut self) {
        if lock(&self.queue).has_lost() {
            self.device.abandon();
        }
    }
}

/// A panic in a thread must not leave a caller waiting.
fn guarded(act: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(act)).unwrap_or(Err(HostError::StagingStopped))
}
