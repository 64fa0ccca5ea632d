//! A copy stream that keeps alive whatever its copies in flight read and write.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_driver::{Bytes, Driver, StreamHandle};
use vmm_alloc::AddressSpace;

use crate::error::{HostError, Result};
use crate::event::Event;
use crate::pending_read::{PendingRead, ReadBuffer};
use crate::prepared::PreparedCopy;
use crate::registered::twice;
use crate::source::HostRun;

/// Device memory is read back through a buffer of this size: large enough for nearly the full rate (52.5 GB/s of 55.3),
/// small enough to be leaked if a copy fails in flight.
const READ_BACK: usize = 16 << 20;

/// A stream for copies, which runs beside the compute stream.
///
/// ```text
///   this stream      wait(last use) ─ copy ─ record(copied)
///   compute stream               hold(copied) ─ kernels ─ record(last use)
/// ```
///
/// Each copy submitted is held, with its sources and its target range, until [`drain`](Self::drain) has seen the
/// stream idle. A copy submitted again and again is held once, so that a steady step allocates nothing.
///
/// Drop never blocks: a stream that is not idle is leaked, with everything it holds and an error in the log. Drain it
/// first.
///
/// The emulator and CUDA both order a stream's work as it was submitted; from several threads, that is the order in
/// which the calls returned.
pub struct TransferStream {
    driver: Arc<dyn Driver>,
    handle: StreamHandle,
    /// Recorded to find out whether the stream is idle.
    tail: Option<Event>,
    held: Mutex<Held>,
}

/// What work in flight uses, by address.
#[derive(Default)]
struct Held {
    copies: HashMap<usize, Arc<PreparedCopy>>,
    spaces: HashMap<usize, Arc<AddressSpace>>,
}

impl TransferStream {
    /// Makes a stream.
    pub fn new(driver: Arc<dyn Driver>) -> Result<Self> {
        let tail = Event::new(Arc::clone(&driver))?;
        let handle = driver.create_stream()?;
        Ok(Self { driver, handle, tail: Some(tail), held: Mutex::new(Held::default()) })
    }

    /// The driver's name of this stream.
    pub fn handle(&self) -> StreamHandle {
        self.handle
    }

    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Blocks until everything submitted has run, and lets go of nothing.
    pub(crate) fn synchronize(&self) -> Result<()> {
        Ok(self.driver.synchronize_stream(self.handle)?)
    }

    /// Makes later work of this stream wait for the event's latest record.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.check_device(event.driver(), "event")?;
        event.hold(self.handle)
    }

    /// Marks the end of what was submitted to this stream.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.check_device(event.driver(), "event")?;
        event.record(self.handle)
    }

    /// Submits a prepared copy, in one driver call. The steady path: it allocates nothing for a copy it has seen since
    /// the last drain.
    ///
    /// # Errors
    /// If a target granule is not mapped or is shut, before anything is submitted; or if the driver fails.
    pub fn enqueue(&self, copy: &Arc<PreparedCopy>) -> Result<()> {
        self.check_device(copy.space().driver(), "address range")?;
        copy.check()?;
        if copy.copies().is_empty() {
            return Ok(());
        }
        self.lock().copies.entry(Arc::as_ptr(copy) as usize).or_insert_with(|| Arc::clone(copy));
        // SAFETY: the targets are mapped and open (checked above) and stay so until the copies have run, by the duty of
        // whoever unmaps (`AddressSpace`, "Device work"); sources and range are held until the stream was idle. That
        // nothing else writes the targets is ordered by events, by the caller, and is device memory in any case.
        Ok(unsafe { self.driver.copy_to_device(copy.copies(), self.handle) }?)
    }

    /// Submits a copy that is made once, such as the upload of resident bytes.
    pub fn copy(&self, space: &Arc<AddressSpace>, runs: &[HostRun]) -> Result<()> {
        self.enqueue(&PreparedCopy::new(space, runs)?)
    }

    /// Sets `bytes` bytes at `offset` of `space` to `value`, in stream order.
    pub fn fill(&self, space: &Arc<AddressSpace>, offset: u64, bytes: Bytes, value: u8) -> Result<()> {
        self.check_device(space.driver(), "address range")?;
        let address = space.writable(offset, bytes)?;
        if bytes == Bytes::ZERO {
            return Ok(());
        }
        self.hold_space(space);
        // SAFETY: the range is mapped and open (checked above) and held until the stream was idle; the rest as in `enqueue`.
        Ok(unsafe { self.driver.fill(address, bytes, value, self.handle) }?)
    }

    /// Copies device memory at `offset` of `space` into `target` once all earlier work of this stream has run. Blocks.
    pub fn read_back(&self, space: &Arc<AddressSpace>, offset: u64, target: &mut [u8]) -> Result<()> {
        self.check_device(space.driver(), "address range")?;
        space.writable(offset, Bytes(target.len() as u64))?;
        self.hold_space(space);
        let mut buffer = ReadBuffer::new(Bytes(target.len().min(READ_BACK) as u64));
        let mut at = offset;
        for piece in target.chunks_mut(READ_BACK) {
            let size = Bytes(piece.len() as u64);
            let source = space.address().offset(Bytes(at));
            // SAFETY: the source is mapped (checked above) and held; the buffer holds `size` bytes and is leaked below
            // unless the copy is known to have run.
            let submitted = unsafe { self.driver.copy_to_host(buffer.target(), source, size, self.handle) };
            if let Err(cause) = submitted.and_then(|()| self.driver.synchronize_stream(self.handle)) {
                std::mem::forget(buffer);
                return Err(cause.into());
            }
            piece.copy_from_slice(&buffer.bytes()[..piece.len()]);
            at += size.0;
        }
        Ok(())
    }

    /// As [`read_back`](Self::read_back) for `bytes` bytes, but goes on at once: the copy runs in stream order.
    pub fn begin_read(&self, space: &Arc<AddressSpace>, offset: u64, bytes: Bytes) -> Result<PendingRead> {
        self.check_device(space.driver(), "address range")?;
        let source = space.writable(offset, bytes)?;
        let done = Event::new(Arc::clone(&self.driver))?;
        let mut buffer = ReadBuffer::new(bytes);
        if bytes > Bytes::ZERO {
            self.hold_space(space);
            // SAFETY: the source is mapped (checked above) and held; the buffer's memory does not move, and it is freed
            // only once the event recorded below was reached, or leaked here.
            let submitted = unsafe { self.driver.copy_to_host(buffer.target(), source, bytes, self.handle) };
            if let Err(error) = submitted.map_err(HostError::from).and_then(|()| done.record(self.handle)) {
                std::mem::forget(buffer);
                return Err(error);
            }
        }
        Ok(PendingRead::new(done, buffer))
    }

    /// Blocks until everything submitted has run, and lets go of what it used.
    ///
    /// # Errors
    /// If the driver reports a failure of the work; what it used stays held then.
    pub fn drain(&self) -> Result<()> {
        let held = std::mem::take(&mut *self.lock());
        if let Err(cause) = self.driver.synchronize_stream(self.handle) {
            let mut now = self.lock();
            now.copies.extend(held.copies);
            now.spaces.extend(held.spaces);
            return Err(cause.into());
        }
        Ok(())
    }

    /// Whether everything submitted has run. Never blocks.
    pub fn is_idle(&self) -> Result<bool> {
        let Some(tail) = &self.tail else { return Ok(true) };
        tail.record(self.handle)?;
        tail.is_reached()
    }

    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn hold_space(&self, space: &Arc<AddressSpace>) {
        self.lock().spaces.entry(Arc::as_ptr(space) as usize).or_insert_with(|| Arc::clone(space));
    }

    pub(crate) fn check_device(&self, driver: &Arc<dyn Driver>, what: &'static str) -> Result<()> {
        if std::ptr::addr_eq(Arc::as_ptr(&self.driver), Arc::as_ptr(driver)) {
            return Ok(());
        }
        Err(HostError::ForeignDevice { what })
    }
}

impl fmt::Debug for TransferStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.lock().copies.len();
        f.debug_struct("TransferStream")
            .field("handle", &self.handle)
            .field("held", &held)
            .finish_non_exhaustive()
    }
}

impl Drop for TransferStream {
    fn drop(&mut self) {
        let idle = twice(|| self.is_idle());
        let held = std::mem::take(self.held.get_mut().unwrap_or_else(PoisonError::into_inner));
        if !matches!(idle, Ok(true)) {
            tracing::error!(stream = ?self.handle, copies = held.copies.len(), "a stream was dropped undrained: leaked");
            std::mem::forget((held, self.tail.take()));
            return;
        }
        let destroy = || {
            // SAFETY: this is the stream's only owner, it was found idle, and it is not used after it was destroyed.
            unsafe { self.driver.destroy_stream(self.handle) }
        };
        if let Err(cause) = twice(destroy) {
            tracing::error!(%cause, stream = ?self.handle, "a stream was not destroyed");
        }
    }
}
