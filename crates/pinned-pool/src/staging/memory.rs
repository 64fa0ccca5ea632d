//! The memory of a ring: chunks in one piece of page-locked memory, each with the event behind its latest copy.

use std::mem::ManuallyDrop;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver, Registration};

use super::options::{FEWEST, Size};
use crate::error::{HostError, Result};
use crate::event::Event;
use crate::limits::memory_limit;
use crate::registered::{KeepAlive, Registered};
use crate::slab::Slab;
use crate::system;

/// A ring that is not page-locked is no longer than this many chunks: the driver copies from it as it is submitted.
const PAGEABLE: u64 = 8;

/// Chunks of host memory that the copy engine reads.
#[derive(Debug)]
pub(super) struct RingMemory {
    // Unlocked before the slab goes: it keeps the slab alive.
    registered: ManuallyDrop<Option<Registered>>,
    slab: ManuallyDrop<Arc<Slab>>,
    events: Vec<Event>,
    chunk: Bytes,
    step_down: Option<String>,
}

impl RingMemory {
    /// Page-locks a ring; one half as long if that is refused, and so on; pageable memory in the end, unless
    /// `locked_only`.
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        size: Size,
        limit: Option<Bytes>,
        locked_only: bool,
    ) -> Result<Self> {
        let limit = limit.or_else(memory_limit);
        let mut slots = size.slots;
        let mut refused: Option<HostError> = None;
        let (slab, registered) = loop {
            let slab = slab_of(slots, size.chunk)?;
            match lock(driver, &slab, Bytes(slots * size.chunk.0), limit) {
                Ok(registered) => break (slab, Some(registered)),
                Err(reason) => {
                    let reason = refused.get_or_insert(reason);
                    if slots > FEWEST {
                        slots = (slots / 2).max(FEWEST);
                    } else if locked_only {
                        return Err(reason.clone());
                    } else {
                        slots = size.slots.min(PAGEABLE);
                        break (slab_of(slots, size.chunk)?, None);
                    }
                }
            }
        };
        let step_down = refused.map(|reason| {
            let bytes = Bytes(slots * size.chunk.0);
            let kind = if registered.is_some() { "page-locked" } else { "pageable" };
            let asked = Bytes(size.slots * size.chunk.0);
            format!(
                "a staging ring of {asked} was refused, {bytes} of {kind} memory are used instead: {reason}"
            )
        });
        if let Some(step_down) = &step_down {
            tracing::warn!("{step_down}");
        }
        let events = (0..slots).map(|_| Event::new(Arc::clone(driver))).collect::<Result<_>>()?;
        let (registered, slab) = (ManuallyDrop::new(registered), ManuallyDrop::new(slab));
        Ok(Self { registered, slab, events, chunk: size.chunk, step_down })
    }

    pub(super) fn slots(&self) -> u32 {
        self.events.len() as u32
    }

    pub(super) fn chunk(&self) -> Bytes {
        self.chunk
    }

    /// How much of it is page-locked: all or nothing.
    pub(super) fn locked(&self) -> Bytes {
        self.registered.as_ref().map_or(Bytes::ZERO, Registered::size)
    }

    /// What was refused, if anything was.
    pub(super) fn step_down(&self) -> Option<&str> {
        self.step_down.as_deref()
    }

    /// The event behind a slot's latest copy.
    pub(super) fn event(&self, slot: u32) -> Option<&Event> {
        self.events.get(slot as usize)
    }

    /// Where a slot's memory begins; it is a chunk long.
    pub(super) fn address(&self, slot: u32) -> *mut u8 {
        debug_assert!((slot as usize) < self.events.len(), "a slot of this ring");
        self.slab.at(u64::from(slot) * self.chunk.0)
    }

    /// A slot's memory, for writing.
    ///
    /// # Safety
    /// The slot is the caller's alone until the slice is gone, and the device has done with it.
    #[expect(clippy::mut_from_ref, reason = "slots are handed out one by one; see Safety")]
    pub(super) unsafe fn slot(&self, slot: u32) -> &mut [u8] {
        // SAFETY: the slot lies in the slab, which lives as long as `self`; it is initialized (zeroed by the system) and
        // nobody else's, by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.address(slot), self.chunk.as_usize()) }
    }

    /// Never gives the memory back: the device may read it for ever.
    pub(super) fn abandon(&mut self) {
        tracing::error!(bytes = %Bytes(self.chunk.0 * self.events.len() as u64), "a staging ring is leaked: the device failed");
        self.events.clear();
        self.chunk = Bytes::ZERO;
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        if self.chunk == Bytes::ZERO {
            return; // Abandoned.
        }
        // SAFETY: dropped here once; nothing uses it after.
        unsafe { ManuallyDrop::drop(&mut self.registered) };
        // SAFETY: as above.
        unsafe { ManuallyDrop::drop(&mut self.slab) };
    }
}

fn slab_of(slots: u64, chunk: Bytes) -> Result<Arc<Slab>> {
    let bytes = slots * chunk.0;
    let slab = Arc::new(Slab::new(Bytes(bytes))?);
    let start = slab.at(0) as u64;
    // SAFETY: the slab's own anonymous memory.
    unsafe { system::prefer_large_pages(start..start + bytes) };
    Ok(slab)
}

fn lock(driver: &Arc<dyn Driver>, slab: &Arc<Slab>, size: Bytes, limit: Option<Bytes>) -> Result<Registered> {
    let keep: KeepAlive = Arc::<Slab>::clone(slab);
    let driver = Arc::clone(driver);
    // SAFETY: whole pages (a chunk is) of the slab's anonymous memory, which `keep` holds.
    unsafe { Registered::new(driver, slab.at(0), size, Registration::ReadWrite, limit, vec![keep]) }
}
