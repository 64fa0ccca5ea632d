//! What a ring's threads do on a real device or the emulator: read into slots, copy from them, mark, and ask.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use gpu_driver::{Bytes, Driver, HostToDevice};
use vmm_alloc::AddressSpace;

use super::copy::StagedCopy;
use super::memory::RingMemory;
use super::queue::Fate;
use super::read::fill;
use super::threads::Device;
use crate::error::{HostError, Result};
use crate::event::Event;
use crate::transfer::TransferStream;

/// A copy with what goes before and after it, all on one stream.
#[derive(Debug, Default)]
pub struct StagedJob {
    /// What is submitted first, in this order.
    pub before: Vec<StagedStep>,
    /// What is copied then.
    pub copy: Option<Arc<StagedCopy>>,
    /// Recorded behind the copy.
    pub copied: Option<Arc<Event>>,
}

/// What is submitted to the stream before a copy.
#[derive(Debug)]
pub enum StagedStep {
    /// The stream waits for the event's latest record, which was made already. Nobody records it again before the job was
    /// submitted.
    Wait(Arc<Event>),
    /// Bytes of a range are set.
    Fill {
        /// The range.
        space: Arc<AddressSpace>,
        /// Where in it.
        offset: u64,
        /// How many bytes.
        bytes: Bytes,
        /// To what.
        value: u8,
    },
}

impl StagedStep {
    /// Submits it to a stream.
    ///
    /// # Errors
    /// As [`TransferStream::wait`] and [`TransferStream::fill`].
    pub fn submit(&self, stream: &TransferStream) -> Result<()> {
        match self {
            Self::Wait(event) => stream.wait(event),
            Self::Fill { space, offset, bytes, value } => stream.fill(space, *offset, *bytes, *value),
        }
    }
}

/// A job and the stream it is for.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) job: StagedJob,
    pub(super) stream: Arc<TransferStream>,
}

/// The slots of a ring and the driver that copies from them.
#[derive(Debug)]
pub(super) struct RingDevice {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) memory: RingMemory,
    pub(super) staged: AtomicU64,
}

/// Asking again at once for about 50 µs, then after pauses: the ring holds milliseconds of copies, so that one noticed a
/// little late costs nothing, and a device that computes for long is not asked all the time.
const AT_ONCE: u32 = 100;
const PAUSE: Duration = Duration::from_micros(50);
const LONGEST_PAUSE: Duration = Duration::from_micros(400);

impl Device for RingDevice {
    type Job = Arc<Work>;

    fn fill(&self, work: &Arc<Work>, chunk: usize, slot: u32) -> Result<()> {
        let part = part(work, chunk)?;
        // SAFETY: the queue gave this slot to this thread alone, and only after the device had done with it.
        let slot = unsafe { self.memory.slot(slot) };
        fill(&part.chunk, &part.direct, slot)
    }

    fn begin(&self, work: &Arc<Work>) -> Result<()> {
        work.job.before.iter().try_for_each(|step| step.submit(&work.stream))?;
        match work.job.copy.as_ref().and_then(|copy| copy.locked()) {
            Some(locked) => work.stream.enqueue(locked),
            None => Ok(()),
        }
    }

    fn copy(&self, work: &Arc<Work>, chunk: usize, slot: u32) -> (Fate, Result<()>) {
        let prepared = part(work, chunk).and_then(|part| {
            let Some(copy) = &work.job.copy else { return Err(HostError::StagingStopped) };
            let base = self.memory.address(slot).cast_const();
            let mut copies = Vec::with_capacity(part.chunk.pieces.len());
            for piece in &part.chunk.pieces {
                let target = copy.space().writable(piece.offset, Bytes(piece.size))?;
                let source = base.wrapping_add(piece.at as usize);
                copies.push(HostToDevice { target, source, size: Bytes(piece.size) });
            }
            work.stream.hold_space(copy.space());
            Ok(copies)
        });
        let copies = match prepared {
            Ok(copies) => copies,
            Err(error) => return (Fate::Unused, Err(error)),
        };
        // SAFETY: the targets are mapped and open (checked above) and stay so until the copies have run, by the duty of
        // whoever unmaps, and their range is held; the sources lie in the slot, which the queue gives to nobody before
        // the mark set below was reached, in memory that outlives all marks. Pieces do not overlap.
        let submitted = unsafe { self.driver.copy_to_device(&copies, work.stream.handle()) };
        let marked = self.memory.event(slot).ok_or(HostError::StagingStopped);
        let marked = marked.and_then(|event| event.record(work.stream.handle()));
        let result = submitted.map_err(HostError::from).and(marked.clone());
        match marked {
            Ok(()) => {
                let bytes: u64 = copies.iter().map(|copy| copy.size.0).sum();
                self.staged.fetch_add(bytes, Ordering::Relaxed);
                (Fate::Flying, result)
            }
            // Without a mark, the stream's end is one.
            Err(_) if self.driver.synchronize_stream(work.stream.handle()).is_ok() => (Fate::Unused, result),
            Err(_) => (Fate::Lost, result),
        }
    }

    fn end(&self, work: &Arc<Work>) -> Result<()> {
        match &work.job.copied {
            Some(copied) => work.stream.record(copied),
            None => Ok(()),
        }
    }

    fn is_reached(&self, slot: u32) -> Result<bool> {
        self.memory.event(slot).ok_or(HostError::StagingStopped)?.is_reached()
    }

    fn pause(&self, round: u32) {
        if round < AT_ONCE {
            thread::yield_now();
        } else {
            thread::sleep((PAUSE * (round - AT_ONCE + 1)).min(LONGEST_PAUSE));
        }
    }

    fn abandon(&mut self) {
        self.memory.abandon();
    }
}

fn part(work: &Work, chunk: usize) -> Result<&super::copy::Part> {
    work.job.copy.as_ref().and_then(|copy| copy.chunks().get(chunk)).ok_or(HostError::StagingStopped)
}
