//! Registering the slab while it is still being filled: what is full goes to a thread of its own, the rest follows at the
//! end.
//!
//! ```text
//!   fill      | piece 0 | piece 1 | piece 2 | rest |
//!   register            | piece 0 | piece 1 | piece 2 | rest |
//! ```

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use gpu_driver::Bytes;

use super::ladder::{Cut, Ladder};
use super::pieces::{before, behind};
use super::registrar::{Pages, Registrar};
use crate::claims::Promise;
use crate::error::{HostError, Result};
use crate::ranges::Ranges;
use crate::registered::{KeepAlive, Registered};
use crate::slab::{PADDING, Slab};
use crate::system;

/// A run of pages to be registered, and the tensors in it.
#[derive(Debug)]
struct Job {
    slab: Arc<Slab>,
    pages: Range<u64>,
    tensors: Arc<[Range<u64>]>,
}

/// What the thread and the builder share.
#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    promise: Promise,
    /// Nothing more is registered: the driver refused, the work was ended, or the builder is gone.
    over: AtomicBool,
}

#[derive(Debug)]
struct State {
    registrar: Registrar,
    ladder: Ladder,
    registered: Vec<Arc<Registered>>,
    refusal: Option<HostError>,
}

/// The registrations of a slab that is being filled.
#[derive(Debug)]
pub(super) struct SlabLock {
    shared: Arc<Shared>,
    thread: Option<(Sender<Job>, JoinHandle<()>)>,
    /// The bytes that are filled, as addresses, padding included.
    filled: Ranges,
    /// The tensors in it, in no order.
    tensors: Vec<Range<u64>>,
    /// Pages that were handed over to be registered.
    handed: Ranges,
    /// Pages for which the limit was promised.
    promised: Ranges,
    piece: u64,
}

impl SlabLock {
    pub(super) fn new(registrar: Registrar, ladder: Ladder, piece: Bytes) -> Self {
        let state = State { registrar, ladder, registered: Vec::new(), refusal: None };
        let shared =
            Shared { state: Mutex::new(state), promise: Promise::default(), over: AtomicBool::new(false) };
        Self {
            shared: Arc::new(shared),
            thread: None,
            filled: Ranges::default(),
            tensors: Vec::new(),
            handed: Ranges::default(),
            promised: Ranges::default(),
            piece: piece.0,
        }
    }

    /// Whether the driver has refused to register the slab, so that copying more into it is of no use.
    pub(super) fn is_refused(&self) -> bool {
        self.shared.over.load(Ordering::Acquire)
    }

    /// The pages that bytes of the slab, by their offsets, take beyond what others of it take.
    pub(super) fn more(&self, bytes: &Range<u64>) -> Bytes {
        Bytes(missing(pages(bytes), &self.promised).iter().map(|part| part.end - part.start).sum())
    }

    /// Has the limit promised for bytes of the slab, by their offsets.
    ///
    /// # Errors
    /// [`HostError::RegisterLimit`].
    pub(super) fn promise(&mut self, bytes: &Range<u64>, limit: Option<Bytes>) -> Result<()> {
        self.shared.promise.add(self.more(bytes), limit)?;
        self.promised.insert(pages(bytes));
        Ok(())
    }

    /// Notes that tensors, by their addresses, were filled, and registers what is full.
    pub(super) fn filled(&mut self, slab: &Arc<Slab>, tensors: impl IntoIterator<Item = Range<u64>>) {
        for bytes in tensors {
            self.filled.insert(bytes.start..bytes.end.next_multiple_of(PADDING));
            self.tensors.push(bytes);
        }
        if self.filled.total() - self.handed.total().min(self.filled.total()) < self.piece {
            return;
        }
        self.tensors.sort_unstable_by_key(|bytes| bytes.start);
        let page = system::page_size();
        let mut ready = Vec::new();
        for run in self.filled.iter() {
            // From a border of pages to another; what lies on the last page waits for its neighbours.
            let Some(start) = behind(&self.tensors, run.start / page * page, page) else { continue };
            let end = before(&self.tensors, run.end / page * page, page);
            ready.extend(
                missing(start..end, &self.handed)
                    .into_iter()
                    .filter(|part| part.end - part.start >= self.piece),
            );
        }
        if ready.is_empty() {
            return;
        }
        let tensors: Arc<[Range<u64>]> = self.tensors.as_slice().into();
        for pages in ready {
            self.handed.insert(pages.clone());
            self.hand(Job { slab: Arc::clone(slab), pages, tensors: Arc::clone(&tensors) });
        }
    }

    /// Registers the rest and waits for all of it: the registrations, and why there are not more.
    pub(super) fn finish(mut self, slab: Option<&Arc<Slab>>) -> (Vec<Arc<Registered>>, Option<HostError>) {
        if let Some((sender, thread)) = self.thread.take() {
            drop(sender);
            if thread.join().is_err() {
                tracing::error!("the thread that locks a slab has ended early");
            }
        }
        if let Some(slab) = slab {
            self.tensors.sort_unstable_by_key(|bytes| bytes.start);
            let tensors: Arc<[Range<u64>]> = self.tensors.as_slice().into();
            let mut touched = Ranges::default();
            for bytes in tensors.iter() {
                touched.insert(pages(bytes));
            }
            for pages in touched.iter().flat_map(|run| missing(run, &self.handed)) {
                self.shared.lock(&Job { slab: Arc::clone(slab), pages, tensors: Arc::clone(&tensors) });
            }
        }
        let mut state = self.shared.state();
        (std::mem::take(&mut state.registered), state.refusal.take())
    }

    /// Ends the work and waits until nothing of it is left.
    pub(super) fn abandon(mut self) {
        self.shared.over.store(true, Ordering::Release);
        if let Some((sender, thread)) = self.thread.take() {
            drop(sender);
            // What it panicked with was told by `finish`, or is of no interest any more.
            drop(thread.join());
        }
    }

    /// Gives a job to the thread, which is started for the first one.
    fn hand(&mut self, job: Job) {
        if self.thread.is_none() {
            let (sender, jobs) = channel::<Job>();
            let shared = Arc::clone(&self.shared);
            let work = move || jobs.iter().for_each(|job| shared.lock(&job));
            match std::thread::Builder::new().name("slab-lock".into()).spawn(work) {
                Ok(thread) => self.thread = Some((sender, thread)),
                Err(error) => tracing::debug!(%error, "a slab is locked without a thread of its own"),
            }
        }
        let job = match &self.thread {
            Some((sender, _)) => sender.send(job).err().map(|refused| refused.0),
            None => Some(job),
        };
        if let Some(job) = job {
            self.shared.lock(&job);
        }
    }
}

impl Drop for SlabLock {
    fn drop(&mut self) {
        // What the thread has not begun is not wanted any more; it ends by itself.
        self.shared.over.store(true, Ordering::Release);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self, job: &Job) {
        if self.over.load(Ordering::Acquire) {
            return;
        }
        let mut state = self.state();
        let State { registrar, ladder, registered, refusal } = &mut *state;
        let done = ladder.lock(job.pages.clone(), Cut::Between(&job.tensors), &mut |pages| {
            if self.over.load(Ordering::Acquire) {
                return Err(HostError::Cancelled);
            }
            let keep: KeepAlive = Arc::<Slab>::clone(&job.slab);
            // SAFETY: whole pages of the slab, which is anonymous memory and lives as long as `keep`.
            let locked = unsafe { registrar.register(pages, Pages::Slab(&self.promise), vec![keep]) };
            registered.push(Arc::new(locked?));
            Ok(())
        });
        if let Err(reason) = done {
            *refusal = Some(reason);
            self.over.store(true, Ordering::Release);
        }
    }
}

/// The pages that bytes touch.
fn pages(bytes: &Range<u64>) -> Range<u64> {
    let page = system::page_size();
    bytes.start / page * page..bytes.end.next_multiple_of(page)
}

/// The parts of `run` that are not in `handed`.
fn missing(run: Range<u64>, handed: &Ranges) -> Vec<Range<u64>> {
    let mut left = Ranges::default();
    left.insert(run);
    for range in handed.iter() {
        left.remove(range);
    }
    left.iter().collect()
}
