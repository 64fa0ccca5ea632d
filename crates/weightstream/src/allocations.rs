//! Device memory for somebody else's allocations, for which weights make room: what an allocator of the application calls.
//!
//! ```text
//!   allocate ── the driver has it ──────────────────────────────▶ an address
//!            └─ it has not ── weights give back ── once more ───▶ an address, or the driver's refusal
//! ```
//!
//! Each allocation is one piece of physical memory behind addresses of its own. Meant for a caching allocator above, which asks
//! rarely and for much: an allocation costs tens of microseconds.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_driver::{Bytes, DeviceAddress, Driver, StreamHandle};
use vmm_alloc::{AddressSpace, PagePool};

use crate::error::{Error, Result};

/// How often weights are asked for one allocation: others may take what was given back.
const ASKS: usize = 4;

/// Allocations of one device.
#[derive(Debug)]
pub struct Allocations {
    driver: Arc<dyn Driver>,
    blocks: Mutex<Blocks>,
}

#[derive(Debug, Default)]
struct Blocks {
    /// By address. A range gives its memory back when it goes.
    spaces: BTreeMap<u64, Arc<AddressSpace>>,
    in_use: Bytes,
    peak: Bytes,
}

impl Allocations {
    /// None yet.
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, blocks: Mutex::default() }
    }

    /// Memory of at least `size` bytes. While the driver has none, `relieve` is asked to give so many bytes back, and says how
    /// many it gave; the last refusal is the answer when it gives none.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocate(&self, size: Bytes, mut relieve: impl FnMut(Bytes) -> Bytes) -> Result<DeviceAddress> {
        let granularity = self.driver.device_info().granularity;
        let size = size.max(Bytes(1)).checked_round_up(granularity).unwrap_or(size);
        let mut asks = 0;
        let space = loop {
            match self.make(size) {
                Ok(space) => break space,
                Err(refused) => {
                    let free = self.driver.memory_info()?.free;
                    asks += 1;
                    // Pieces of what is free may be too small: then at least something has to go.
                    if asks > ASKS || relieve((size - free).max(granularity)) == Bytes::ZERO {
                        return Err(refused);
                    }
                }
            }
        };
        let address = space.address();
        let mut blocks = self.lock();
        blocks.spaces.insert(address.0, space);
        blocks.in_use = blocks.in_use + size;
        blocks.peak = blocks.peak.max(blocks.in_use);
        Ok(address)
    }

    /// Gives an allocation back, once what `stream` holds has run. Blocks. Nothing happens for an address that is none.
    ///
    /// # Errors
    /// The driver's; the allocation stays then.
    pub fn free(&self, address: DeviceAddress, stream: StreamHandle) -> Result<()> {
        self.driver.synchronize_stream(stream)?;
        let mut blocks = self.lock();
        if let Some(space) = blocks.spaces.remove(&address.0) {
            blocks.in_use = blocks.in_use - space.granule();
            drop(blocks);
            drop(space);
        }
        Ok(())
    }

    /// The bytes that are allocated now, and the most that ever were.
    pub fn report(&self) -> (Bytes, Bytes) {
        let blocks = self.lock();
        (blocks.in_use, blocks.peak)
    }

    fn make(&self, size: Bytes) -> Result<Arc<AddressSpace>> {
        let pages = PagePool::new(Arc::clone(&self.driver), size, size)?.take(1)?;
        let space = AddressSpace::reserve(Arc::clone(&self.driver), size, 1)?;
        space.map(0, &pages).map_err(Error::from)?;
        Ok(space)
    }

    fn lock(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
