//! The threads behind the emulator's copy streams: one each, all sharing one [`Queue`] under one lock.
//!
//! Every change that may let somebody go on wakes everybody: there are a handful of threads, and a wake-up that
//! could be lost is the one bug this module must not have (the model checker's tests look for it).

use std::collections::HashMap;
use std::io;

use crate::host::options::CopyOrder;
use crate::host::queue::{Mark, Next, Queue, Work};
use crate::host::sync::{Arc, Condvar, Mutex, MutexGuard, lock, thread, wait};

#[derive(Debug)]
struct Shared<W> {
    queue: Mutex<Queue<W>>,
    changed: Condvar,
}

/// The copy streams of one emulated device.
#[derive(Debug)]
pub(super) struct Streams<W: Work> {
    shared: Arc<Shared<W>>,
    threads: Mutex<HashMap<u64, thread::JoinHandle<()>>>,
}

/// Why a stream was not ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    /// There is no such stream.
    Unknown,
    /// It still has work.
    Busy,
}

impl<W: Work> Streams<W> {
    pub(super) fn new(order: CopyOrder, seed: u64) -> Self {
        let queue = Mutex::new(Queue::new(order, seed));
        Self {
            shared: Arc::new(Shared { queue, changed: Condvar::new() }),
            threads: Mutex::new(HashMap::new()),
        }
    }

    /// The queue, for what changes nothing that anybody waits for.
    pub(super) fn queue(&self) -> MutexGuard<'_, Queue<W>> {
        lock(&self.shared.queue)
    }

    /// Changes the queue and wakes whoever that may concern.
    pub(super) fn change<R>(&self, act: impl FnOnce(&mut Queue<W>) -> R) -> R {
        let result = act(&mut lock(&self.shared.queue));
        self.shared.changed.notify_all();
        result
    }

    /// Makes a stream and its thread.
    pub(super) fn create(&self) -> io::Result<u64> {
        let mut threads = lock(&self.threads);
        let stream = self.queue().add_stream();
        let shared = Arc::clone(&self.shared);
        let name = format!("host-copy-{stream}");
        match thread::Builder::new().name(name).spawn(move || shared.serve(stream)) {
            Ok(thread) => {
                threads.insert(stream, thread);
                Ok(stream)
            }
            Err(error) => {
                self.queue().remove_stream(stream);
                Err(error)
            }
        }
    }

    /// Ends an idle stream and its thread.
    pub(super) fn destroy(&self, stream: u64) -> Result<(), Refusal> {
        let mut threads = lock(&self.threads);
        self.change(|queue| match (queue.has_stream(stream), queue.is_idle(stream)) {
            (false, _) => Err(Refusal::Unknown),
            (true, false) => Err(Refusal::Busy),
            (true, true) => {
                queue.remove_stream(stream);
                Ok(())
            }
        })?;
        if let Some(thread) = threads.remove(&stream) {
            join(thread);
        }
        Ok(())
    }

    /// Blocks until a mark is reached, letting its stream run that far.
    pub(super) fn wait_for(&self, mark: Mark) {
        let mut queue = lock(&self.shared.queue);
        if queue.drive(mark) {
            self.shared.changed.notify_all();
        }
        while !queue.reached(mark) {
            queue = wait(&self.shared.changed, queue);
        }
    }
}

impl<W: Work> Shared<W> {
    /// The life of a stream's thread.
    fn serve(&self, stream: u64) {
        let mut queue = lock(&self.queue);
        loop {
            match queue.next(stream) {
                Next::Stop => return,
                Next::Idle => queue = wait(&self.changed, queue),
                Next::Moved => self.changed.notify_all(),
                Next::Run(work, share) => {
                    drop(queue);
                    work.run(share);
                    queue = lock(&self.queue);
                    queue.finish(stream);
                    self.changed.notify_all();
                }
                Next::Tease(work, share) => {
                    drop(queue);
                    work.run(share);
                    queue = lock(&self.queue);
                }
            }
        }
    }
}

fn join(thread: thread::JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a copy thread of the emulator panicked");
    }
}

/// Ends the threads. Work that has not begun does not run: nobody is left to see it.
impl<W: Work> Drop for Streams<W> {
    fn drop(&mut self) {
        self.change(Queue::stop);
        let mut threads = lock(&self.threads);
        for (_, thread) in threads.drain() {
            join(thread);
        }
    }
}
