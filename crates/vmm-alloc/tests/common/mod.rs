//! Drivers for the tests, and looking at emulated device memory.
#![allow(dead_code, clippy::unwrap_used, unreachable_pub, reason = "shared by several test binaries")]

use std::sync::Arc;

use gpu_driver::{Bytes, Driver, Faulty, HostDriver, HostOptions, Verb};
use vmm_alloc::AddressSpace;

/// A driver that can be made to fail, over an emulator with the given granularity.
pub struct Rig {
    pub host: Arc<HostDriver>,
    pub faulty: Arc<Faulty<HostDriver>>,
    pub driver: Arc<dyn Driver>,
}

impl Rig {
    pub fn new(granularity: Bytes) -> Self {
        let options = HostOptions::new(Bytes(granularity.0 * 256)).granularity(granularity);
        let host = Arc::new(HostDriver::new(options).unwrap());
        let faulty = Arc::new(Faulty::new(Arc::clone(&host)));
        let driver: Arc<dyn Driver> = Arc::<Faulty<HostDriver>>::clone(&faulty);
        Self { host, faulty, driver }
    }

    pub fn small() -> Self {
        Self::new(Bytes::kib(64))
    }

    /// Fails calls of `verb` that are `ahead` calls away.
    pub fn fail_ahead(&self, verb: Verb, ahead: &[u64]) {
        let now = self.faulty.calls(verb);
        for calls in ahead {
            self.faulty.fail(verb, now + calls);
        }
    }
}

/// Writes a number at the start of a mapped granule.
#[allow(unsafe_code, reason = "emulated device memory is memory of this process")]
pub fn write(space: &AddressSpace, granule: u32, value: u64) {
    let address = space.writable(u64::from(granule) * space.granule().0, Bytes(8)).unwrap();
    // SAFETY: mapped and open, as `writable` says; nothing else runs.
    unsafe { (address.0 as *mut u64).write_volatile(value) };
}

/// Reads the number at the start of a mapped granule; the tail comes after the last.
#[allow(unsafe_code, reason = "emulated device memory is memory of this process")]
pub fn read(space: &AddressSpace, granule: u32) -> u64 {
    assert!(space.page(granule).is_some(), "granule {granule} is mapped");
    let address = space.address().0 + u64::from(granule) * space.granule().0;
    // SAFETY: mapped, as asserted; the tests read only open granules.
    unsafe { (address as *const u64).read_volatile() }
}

/// The page handles behind all granules, the tail last.
pub fn handles(space: &AddressSpace) -> Vec<Option<u64>> {
    (0..=space.granules()).map(|granule| space.page(granule).map(|page| page.handle().0)).collect()
}
