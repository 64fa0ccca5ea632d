//! Drivers, and host memory of every kind with known bytes in it.
#![allow(
    dead_code,
    unsafe_code,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "shared by several test binaries"
)]

use std::fs::File;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_driver::{Bytes, CopyOrder, Driver, Faulty, HostDriver, HostOptions, Verb};
use pinned_pool::{HostBytes, HostError, HostRun, SourceTensor, StoreOptions, TransferStream};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use vmm_alloc::{AddressSpace, PagePool};

pub const PAGE: u64 = 4096;

/// A driver that can be made to fail, over an emulator.
pub struct Rig {
    pub host: Arc<HostDriver>,
    pub faulty: Arc<Faulty<HostDriver>>,
    pub driver: Arc<dyn Driver>,
}

impl Rig {
    pub fn new(order: CopyOrder, seed: u64) -> Self {
        let options = HostOptions::new(Bytes::mib(256)).order(order).seed(seed);
        let host = Arc::new(HostDriver::new(options).unwrap());
        let faulty = Arc::new(Faulty::new(Arc::clone(&host)));
        let driver: Arc<dyn Driver> = Arc::<Faulty<HostDriver>>::clone(&faulty);
        Self { host, faulty, driver }
    }

    pub fn eager() -> Self {
        Self::new(CopyOrder::Eager, 0)
    }

    /// Fails calls of `verb` that are `ahead` calls away.
    pub fn fail_ahead(&self, verb: Verb, ahead: &[u64]) {
        let now = self.faulty.calls(verb);
        for calls in ahead {
            self.faulty.fail(verb, now + calls);
        }
    }

    /// A range of `bytes`, every granule with a page of its own.
    pub fn space(&self, bytes: u64) -> Arc<AddressSpace> {
        let granule = Bytes::kib(64);
        let granules = bytes.div_ceil(granule.0).max(1) as u32;
        let pool =
            PagePool::new(Arc::clone(&self.driver), granule, Bytes(granule.0 * u64::from(granules))).unwrap();
        let space = AddressSpace::reserve(Arc::clone(&self.driver), granule, granules).unwrap();
        space.map(0, &pool.take(granules as usize).unwrap()).unwrap();
        space
    }

    pub fn stream(&self) -> TransferStream {
        TransferStream::new(Arc::clone(&self.driver)).unwrap()
    }
}

/// Options under which runs of two pages and more stay in place and parts of a refused slab are small.
pub fn small_options() -> StoreOptions {
    StoreOptions {
        min_in_place: Bytes(2 * PAGE),
        chunk: Bytes(8 * PAGE),
        threads: Some(2),
        ..StoreOptions::default()
    }
}

/// Bytes that tell every position and every seed apart.
pub fn pattern(seed: u64, at: u64) -> u8 {
    let mixed = (seed << 32 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed >> 56) as u8
}

/// How many bytes of sources are alive, of all regions that share this.
#[derive(Debug, Default)]
pub struct Held(AtomicU64);

impl Held {
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

type OnDrop = Box<dyn Fn() + Send + Sync>;

/// A mapping of its own, filled with a pattern.
pub struct Region {
    address: *mut u8,
    size: usize,
    seed: u64,
    held: Option<Arc<Held>>,
    on_drop: Option<OnDrop>,
}

// SAFETY: the memory is written before the region is shared and only read after.
unsafe impl Send for Region {}
// SAFETY: as for `Send`.
unsafe impl Sync for Region {}

impl Region {
    fn fill(address: *mut std::ffi::c_void, size: usize, seed: u64) -> Self {
        let region = Self { address: address.cast(), size, seed, held: None, on_drop: None };
        for at in 0..size {
            // SAFETY: inside the mapping, which nobody else knows yet.
            unsafe { region.address.wrapping_add(at).write(pattern(seed, at as u64)) };
        }
        region
    }

    pub fn anonymous(pages: u64, seed: u64) -> Self {
        let size = (pages * PAGE) as usize;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping.
        let mapped =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), size, protection, MapFlags::PRIVATE) };
        Self::fill(mapped.unwrap(), size, seed)
    }

    pub fn file(pages: u64, seed: u64, flags: MapFlags) -> Self {
        let size = (pages * PAGE) as usize;
        let file: File = tempfile::tempfile().unwrap();
        file.set_len(size as u64).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a file that only this test knows.
        let mapped = unsafe { rustix::mm::mmap(std::ptr::null_mut(), size, protection, flags, &file, 0) };
        Self::fill(mapped.unwrap(), size, seed)
    }

    pub fn read_only(pages: u64, seed: u64) -> Self {
        Self::anonymous(pages, seed).protected()
    }

    /// Forbids writing to it.
    pub fn protected(self) -> Self {
        // SAFETY: the region's own mapping, which nobody writes any more.
        unsafe { rustix::mm::mprotect(self.address.cast(), self.size, MprotectFlags::READ) }.unwrap();
        self
    }

    pub fn counted(mut self, held: &Arc<Held>) -> Self {
        held.0.fetch_add(self.size as u64, Ordering::SeqCst);
        self.held = Some(Arc::clone(held));
        self
    }

    pub fn on_drop(mut self, act: impl Fn() + Send + Sync + 'static) -> Self {
        self.on_drop = Some(Box::new(act));
        self
    }

    pub fn address(&self) -> *mut u8 {
        self.address
    }

    pub fn share(self) -> Arc<Self> {
        Arc::new(self)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some(act) = &self.on_drop {
            act();
        }
        if let Some(held) = &self.held {
            held.0.fetch_sub(self.size as u64, Ordering::SeqCst);
        }
        // SAFETY: the region's own mapping; whoever reads it holds the region.
        unsafe { rustix::mm::munmap(self.address.cast(), self.size) }.unwrap();
    }
}

/// A part of a region as a source, and what its bytes are.
#[derive(Clone)]
pub struct Part {
    pub region: Arc<Region>,
    pub range: Range<u64>,
}

impl Part {
    pub fn new(region: &Arc<Region>, range: Range<u64>) -> Self {
        assert!(range.end <= region.size as u64);
        Self { region: Arc::clone(region), range }
    }

    pub fn whole(region: Region) -> Self {
        let size = region.size as u64;
        Self { region: region.share(), range: 0..size }
    }

    pub fn bytes(&self) -> HostBytes {
        let address = self.region.address.wrapping_add(self.range.start as usize);
        let size = Bytes(self.range.end - self.range.start);
        // SAFETY: inside the region, which the keep-alive holds and nobody writes.
        unsafe { HostBytes::new(address, size, Arc::<Region>::clone(&self.region)) }
    }

    pub fn source(&self, id: u32, offset: u64) -> SourceTensor {
        SourceTensor::new(id, offset, self.bytes())
    }

    pub fn expected(&self) -> Vec<u8> {
        self.range.clone().map(|at| pattern(self.region.seed, at)).collect()
    }
}

/// Copies `runs` to a device range of 0xAA and reads `line` of it back.
pub fn upload(rig: &Rig, line: Range<u64>, runs: &[HostRun]) -> Vec<u8> {
    let (space, stream) = (rig.space(line.end), rig.stream());
    stream.fill(&space, 0, space.size(), 0xAA).unwrap();
    stream.copy(&space, runs).unwrap();
    let mut bytes = vec![0; (line.end - line.start) as usize];
    stream.read_back(&space, line.start, &mut bytes).unwrap();
    stream.drain().unwrap();
    bytes
}

/// Copies host bytes to the device in one call, as an application does that knows nothing of registrations, and back.
pub fn copied_whole(rig: &Rig, bytes: &HostBytes) -> Result<Vec<u8>, HostError> {
    let (space, stream) = (rig.space(bytes.size().0), rig.stream());
    stream.copy(&space, &[HostRun::new(0, bytes.clone())])?;
    let mut seen = vec![0; bytes.size().as_usize()];
    stream.read_back(&space, 0, &mut seen)?;
    stream.drain()?;
    Ok(seen)
}

/// Tests that look at process-wide numbers run one at a time.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}
