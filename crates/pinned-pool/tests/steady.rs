//! The steady step allocates nothing: a counting allocator, over a driver that does nothing.
#![allow(clippy::unwrap_used, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use gpu_driver::{
    Access, Bytes, DeviceAddress, DeviceIdentity, DeviceInfo, DeviceKind, DeviceOrdinal, Driver, EventHandle,
    HostToDevice, KernelArgument, KernelHandle, LaunchGrid, MemoryInfo, ModuleHandle, PageHandle,
    Registration, Result, StreamHandle,
};
use pinned_pool::{Event, HostBytes, HostRun, PreparedCopy, TransferStream};
use vmm_alloc::{AddressSpace, PagePool};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: everything is the system allocator's; counting changes nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Says yes to everything; addresses and handles are made up and nothing is at them.
#[derive(Debug)]
struct Nothing {
    info: DeviceInfo,
    next: AtomicU64,
    copies: AtomicU64,
}

impl Nothing {
    fn handle(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }
}

impl Driver for Nothing {
    fn device_info(&self) -> &DeviceInfo {
        &self.info
    }
    fn memory_info(&self) -> Result<MemoryInfo> {
        Ok(MemoryInfo { free: Bytes::mib(64), total: Bytes::mib(64) })
    }
    fn reserve_address(&self, _: Bytes, _: Bytes) -> Result<DeviceAddress> {
        Ok(DeviceAddress(1 << 40))
    }
    unsafe fn free_address(&self, _: DeviceAddress, _: Bytes) -> Result<()> {
        Ok(())
    }
    fn create_pages(&self, _: Bytes) -> Result<PageHandle> {
        Ok(PageHandle(self.handle()))
    }
    unsafe fn release_pages(&self, _: PageHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn map_pages(&self, _: DeviceAddress, _: Bytes, _: PageHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn unmap_pages(&self, _: DeviceAddress, _: Bytes) -> Result<()> {
        Ok(())
    }
    unsafe fn set_access(&self, _: DeviceAddress, _: Bytes, _: Access) -> Result<()> {
        Ok(())
    }
    fn create_stream(&self) -> Result<StreamHandle> {
        Ok(StreamHandle(self.handle()))
    }
    unsafe fn destroy_stream(&self, _: StreamHandle) -> Result<()> {
        Ok(())
    }
    fn synchronize_stream(&self, _: StreamHandle) -> Result<()> {
        Ok(())
    }
    fn is_capturing(&self, _: StreamHandle) -> Result<bool> {
        Ok(false)
    }
    fn create_timer(&self) -> Result<EventHandle> {
        self.create_event()
    }
    fn elapsed(&self, _: EventHandle, _: EventHandle) -> Result<Option<f64>> {
        Ok(None)
    }
    fn create_event(&self) -> Result<EventHandle> {
        Ok(EventHandle(self.handle()))
    }
    unsafe fn destroy_event(&self, _: EventHandle) -> Result<()> {
        Ok(())
    }
    fn record_event(&self, _: EventHandle, _: StreamHandle) -> Result<()> {
        Ok(())
    }
    fn wait_event(&self, _: StreamHandle, _: EventHandle) -> Result<()> {
        Ok(())
    }
    fn query_event(&self, _: EventHandle) -> Result<bool> {
        Ok(true)
    }
    fn synchronize_event(&self, _: EventHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn register_host(&self, _: *mut u8, _: Bytes, _: Registration) -> Result<()> {
        Ok(())
    }
    unsafe fn unregister_host(&self, _: *mut u8) -> Result<()> {
        Ok(())
    }
    unsafe fn copy_to_device(&self, copies: &[HostToDevice], _: StreamHandle) -> Result<()> {
        self.copies.fetch_add(copies.len() as u64, Ordering::Relaxed);
        Ok(())
    }
    unsafe fn copy_to_host(&self, _: *mut u8, _: DeviceAddress, _: Bytes, _: StreamHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn fill(&self, _: DeviceAddress, _: Bytes, _: u8, _: StreamHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn load_module(&self, _: &CStr) -> Result<ModuleHandle> {
        Ok(ModuleHandle(self.handle()))
    }
    unsafe fn unload_module(&self, _: ModuleHandle) -> Result<()> {
        Ok(())
    }
    unsafe fn find_kernel(&self, _: ModuleHandle, _: &CStr) -> Result<KernelHandle> {
        Ok(KernelHandle(self.handle()))
    }
    unsafe fn launch(
        &self,
        _: KernelHandle,
        _: LaunchGrid,
        _: &[KernelArgument<'_>],
        _: StreamHandle,
    ) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_steady_step_allocates_nothing() {
    let info = DeviceInfo {
        kind: DeviceKind::Host,
        identity: DeviceIdentity { kind: DeviceKind::Host, number: u64::MAX },
        ordinal: DeviceOrdinal(0),
        name: "nothing".into(),
        total_memory: Bytes::mib(64),
        granularity: Bytes::kib(64),
        driver_version: 0,
        kernel_driver: None,
        read_only_registration: true,
        batch_copies: true,
    };
    let nothing = Arc::new(Nothing { info, next: AtomicU64::new(1), copies: AtomicU64::new(0) });
    let driver: Arc<dyn Driver> = Arc::<Nothing>::clone(&nothing);
    let granule = Bytes::kib(64);
    let space = AddressSpace::reserve(Arc::clone(&driver), granule, 64).unwrap();
    let pool = PagePool::new(Arc::clone(&driver), granule, Bytes::mib(4)).unwrap();
    space.map(0, &pool.take(64).unwrap()).unwrap();
    let stream = TransferStream::new(Arc::clone(&driver)).unwrap();
    let source = Arc::new(vec![1u8; 3 << 16]);
    let unit = |index: u64| {
        let runs = [
            HostRun::new(index << 18, HostBytes::of(&source)),
            HostRun::new((index << 18) + (3 << 16), HostBytes::of(&source)),
        ];
        let copied = Event::new(Arc::clone(&driver)).unwrap();
        let last_use = Event::new(Arc::clone(&driver)).unwrap();
        (PreparedCopy::new(&space, &runs[..1]).unwrap(), copied, last_use)
    };
    let units: Vec<_> = (0..16).map(unit).collect();
    let compute = StreamHandle(77);
    let step = || {
        for (copy, copied, last_use) in &units {
            stream.wait(last_use).unwrap();
            stream.enqueue(copy).unwrap();
            stream.record(copied).unwrap();
            copied.hold(compute).unwrap();
            last_use.record(compute).unwrap();
            stream.fill(&space, 0, Bytes(1), 0).unwrap();
        }
    };
    step();
    let before = ALLOCATIONS.load(Ordering::SeqCst);
    for _ in 0..100 {
        step();
    }
    assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0);
    assert_eq!(nothing.copies.load(Ordering::Relaxed), 101 * 16);
    stream.drain().unwrap();
}
