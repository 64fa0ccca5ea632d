//! The ring of a device, shared by all who stream to it: made when first needed, gone with its last user.

use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_driver::{Bytes, DeviceIdentity, Driver};
use vmm_alloc::AddressSpace;

use super::copy::StagedCopy;
use super::device::{RingDevice, StagedJob, Work};
use super::memory::RingMemory;
use super::options::StagingOptions;
use super::queue::LineId;
use super::read::{DirectFiles, cache_holds};
use super::threads::Threads;
use crate::error::{HostError, Result};
use crate::limits::memory_limit;
use crate::source::LineRun;
use crate::transfer::TransferStream;

type Ring = Threads<RingDevice>;

/// One ring for every device of the process, whichever of its drivers asks: each ring holds the first.
static RINGS: Mutex<Vec<Entry>> = Mutex::new(Vec::new());

struct Entry {
    device: DeviceIdentity,
    process: u32,
    users: usize,
    ring: Arc<Mutex<Option<Arc<Ring>>>>,
}

fn rings() -> MutexGuard<'static, Vec<Entry>> {
    RINGS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn of<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One user's work on the staging ring of its device: jobs that go to one stream, in the order they were given.
///
/// ```text
///   submit(job)      waits ─ locked runs ─ chunk ─ chunk ─ … ─ record     on the stream, in this order
///   threads          read chunk │ read chunk │ …                          ahead of it, while the device computes
///   wait_submitted                                           ┴ the host goes on: the record is on the stream
/// ```
///
/// Nothing else may be submitted to the stream unless the line [is open](Self::is_open).
///
/// **Waits.** A job waits on the stream for events recorded before it was given; so whatever the host waits for here is
/// reads, and device work that was submitted earlier: it ends.
///
/// **Drop** never blocks: jobs not submitted are forgotten, and the ring's memory goes once the device has done with it.
/// [`close`](Self::close) waits for that. In a forked child nothing is given back, and calls are refused.
pub struct StagingLine {
    ring: ManuallyDrop<Arc<Ring>>,
    stream: ManuallyDrop<Arc<TransferStream>>,
    device: DeviceIdentity,
    process: u32,
    id: LineId,
    /// Of files that are read around the page cache; `None` reads all through it.
    files: Mutex<Option<DirectFiles>>,
    bytes: AtomicU64,
    waits: AtomicU64,
    closed: bool,
}

/// A job that was given to a [`StagingLine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ticket(u64);

/// A moment's view of a ring and of one user of it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StagingReport {
    /// Bytes of the ring that are page-locked: all or none.
    pub locked: Bytes,
    /// The bytes of one chunk.
    pub chunk: Bytes,
    /// How many chunks there are.
    pub chunks: u32,
    /// Threads that read.
    pub threads: usize,
    /// What was refused when the ring was made, and what was done instead.
    pub step_down: Option<String>,
    /// Whether files are read around the page cache.
    pub around_cache: bool,
    /// Bytes that all users copied through the ring.
    pub staged: Bytes,
    /// Times this user had to wait for a job to be submitted.
    pub waits: u64,
}

impl StagingLine {
    /// Joins the ring of a stream's device, which is made with `options` if this is the first to need it. `file_bytes` are
    /// those that are read from files over and over.
    ///
    /// # Errors
    /// If there is no memory or no thread for the ring, or if the driver makes no events. A refusal to page-lock is no
    /// error, unless `options` say so: the ring is smaller then, or pageable, and the report says why.
    pub fn new(stream: &Arc<TransferStream>, options: &StagingOptions, file_bytes: Bytes) -> Result<Self> {
        let driver = stream.driver();
        let device = driver.device_info().identity;
        let process = std::process::id();
        let ring = join(driver, device, process, options)?;
        let files = if cache_holds(file_bytes) { None } else { Some(DirectFiles::default()) };
        Ok(Self {
            id: ring.add_line(),
            ring: ManuallyDrop::new(ring),
            stream: ManuallyDrop::new(Arc::clone(stream)),
            device,
            process,
            files: Mutex::new(files),
            bytes: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            closed: false,
        })
    }

    /// Works out a copy that can be submitted many times. The targets need not be mapped yet.
    ///
    /// # Errors
    /// If a run reaches beyond the range.
    pub fn prepare(&self, space: &Arc<AddressSpace>, runs: &[LineRun]) -> Result<Arc<StagedCopy>> {
        StagedCopy::new(space, runs, self.ring.device().memory.chunk(), of(&self.files).as_mut())
    }

    /// Gives a job to the ring's threads.
    ///
    /// # Errors
    /// After a fork, after [`close`](Self::close), if the driver refused a wait of an earlier job, or if the ring has lost all
    /// of its chunks to a failed device.
    pub fn submit(&self, job: StagedJob) -> Result<Ticket> {
        self.check()?;
        if let Some(copy) = &job.copy {
            self.stream.check_device(copy.space().driver(), "address range")?;
        }
        let (chunks, bytes) =
            job.copy.as_ref().map_or((0, Bytes::ZERO), |copy| (copy.chunks().len(), copy.staged_bytes()));
        let work = Arc::new(Work { job, stream: Arc::clone(&self.stream) });
        let number = self.ring.submit(self.id, work, chunks)?;
        self.bytes.fetch_add(bytes.0, Ordering::Relaxed);
        Ok(Ticket(number))
    }

    /// Blocks until a job's copies and its record are on the stream; says whether that took any waiting.
    ///
    /// # Errors
    /// What the job failed with: a file that could not be read or has changed, the driver, or that it was cancelled. The
    /// jobs behind it go on, unless the driver refused a wait, on which they may rely: they fail then, too, and so do all
    /// others until [`cancel`](Self::cancel).
    pub fn wait_submitted(&self, ticket: Ticket) -> Result<bool> {
        self.check()?;
        let (outcome, waited) = self.ring.wait(self.id, ticket.0);
        self.waits.fetch_add(u64::from(waited), Ordering::Relaxed);
        outcome.map(|()| waited)
    }

    /// Whether everything given was submitted.
    pub fn is_clear(&self) -> bool {
        self.process == std::process::id() && self.ring.is_clear(self.id)
    }

    /// Whether others may submit to the stream now: everything given was submitted, and no wait is missing.
    pub fn is_open(&self) -> bool {
        self.check().is_ok() && self.ring.is_open(self.id)
    }

    /// Blocks until everything given was submitted or has failed.
    ///
    /// # Errors
    /// After a fork or [`close`](Self::close).
    pub fn wait_clear(&self) -> Result<()> {
        self.check()?;
        self.ring.wait_clear(self.id);
        Ok(())
    }

    /// Takes back what was not submitted. Blocks until no thread reads for this user. What is submitted later must not rely
    /// on waits of what was taken back: wait for all work before.
    ///
    /// # Errors
    /// After a fork or [`close`](Self::close).
    pub fn cancel(&self) -> Result<()> {
        self.check()?;
        self.ring.cancel(self.id);
        self.ring.reap(self.id);
        Ok(())
    }

    /// Cancels, waits for the stream, and leaves the ring; the last user also waits for its threads to end and gives its
    /// memory back. Blocks. Closing twice is no error.
    ///
    /// # Errors
    /// After a fork; or if the driver fails: closing can be tried again then.
    pub fn close(&mut self) -> Result<()> {
        if self.closed {
            return Ok(());
        }
        self.cancel()?;
        if self.ring.is_flying(self.id) {
            self.stream.synchronize()?;
            self.ring.reap(self.id);
        }
        self.closed = true;
        self.ring.remove_line(self.id);
        if let Some(ring) = leave(self.device, self.process) {
            ring.join();
        }
        Ok(())
    }

    /// The ring and this user's part in numbers.
    pub fn report(&self) -> StagingReport {
        let device = self.ring.device();
        StagingReport {
            locked: if self.closed { Bytes::ZERO } else { device.memory.locked() },
            chunk: device.memory.chunk(),
            chunks: device.memory.slots(),
            threads: self.ring.count(),
            step_down: device.memory.step_down().map(Into::into),
            around_cache: of(&self.files).is_some(),
            staged: Bytes(device.staged.load(Ordering::Relaxed)),
            waits: self.waits.load(Ordering::Relaxed),
        }
    }

    /// Bytes given to pass through the ring so far.
    pub fn submitted_bytes(&self) -> Bytes {
        Bytes(self.bytes.load(Ordering::Relaxed))
    }

    fn check(&self) -> Result<()> {
        if self.process != std::process::id() {
            return Err(HostError::Forked);
        }
        if self.closed { Err(HostError::StagingStopped) } else { Ok(()) }
    }
}

impl fmt::Debug for StagingLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagingLine").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Drop for StagingLine {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return; // The threads are the parent's, and a lock may be held for ever.
        }
        if !self.closed {
            self.ring.remove_line(self.id);
            if let Some(ring) = leave(self.device, self.process) {
                ring.stop();
            }
        }
        // SAFETY: dropped here once; nothing uses it after.
        unsafe { ManuallyDrop::drop(&mut self.ring) };
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.stream) };
    }
}

/// The ring of a device, made if this is its first user.
fn join(
    driver: &Arc<dyn Driver>,
    device: DeviceIdentity,
    process: u32,
    options: &StagingOptions,
) -> Result<Arc<Ring>> {
    let cell = {
        let mut rings = rings();
        let found = rings.iter_mut().find(|entry| entry.device == device && entry.process == process);
        if let Some(entry) = found {
            entry.users += 1;
            Arc::clone(&entry.ring)
        } else {
            let ring = Arc::default();
            rings.push(Entry { device, process, users: 1, ring: Arc::clone(&ring) });
            ring
        }
    };
    // Only those who need this device's ring wait for it to be made.
    let mut ring = of(&cell);
    if let Some(ring) = ring.as_ref() {
        return Ok(Arc::clone(ring));
    }
    let made = make(driver, options);
    match made {
        Ok(made) => Ok(Arc::clone(ring.insert(Arc::new(made)))),
        Err(error) => {
            drop(ring);
            leave(device, process);
            Err(error)
        }
    }
}

fn make(driver: &Arc<dyn Driver>, options: &StagingOptions) -> Result<Ring> {
    let size = options.size(driver.device_info().total_memory, memory_limit());
    let memory = RingMemory::new(driver, size, options.register_limit, options.locked_only)?;
    let slots = memory.slots();
    let device = RingDevice { driver: Arc::clone(driver), memory, staged: AtomicU64::new(0) };
    Threads::start(device, slots, size.threads)
        .map_err(|error| HostError::Threads { message: error.to_string() })
}

/// One user less; the ring, if that was the last.
fn leave(device: DeviceIdentity, process: u32) -> Option<Arc<Ring>> {
    let cell = {
        let mut rings = rings();
        let at = rings.iter().position(|entry| entry.device == device && entry.process == process)?;
        rings[at].users -= 1;
        if rings[at].users > 0 {
            return None;
        }
        rings.swap_remove(at).ring
    };
    of(&cell).take()
}
