//! A driver that fails on purpose: any call of any verb, so that tests can ask what is left after it.
//!
//! A failed call does not reach the driver behind. The one exception is a batch of copies, whose first half is
//! submitted before the failure, as the contract of [`Driver::copy_to_device`] allows.

use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::Driver;
use crate::error::{DriverError, Result};
use crate::module::{KernelArgument, LaunchGrid};
use crate::types::{
    Access, Bytes, DeviceAddress, DeviceInfo, EventHandle, HostToDevice, KernelHandle, MemoryInfo,
    ModuleHandle, PageHandle, Registration, StreamHandle,
};
use crate::verb::{Verb, VerbCounts};

#[derive(Debug, Clone)]
struct Fault {
    verb: Verb,
    index: u64,
    error: DriverError,
    /// The next call, whichever it is, reports the error again.
    stays: bool,
}

#[derive(Debug, Default)]
struct Script {
    faults: Vec<Fault>,
    pending: Option<DriverError>,
    longest_registration: Option<Bytes>,
    recording: bool,
    record: Vec<Verb>,
}

/// Wraps a driver, counts and records its calls, and fails the ones it was told to.
///
/// ```
/// use std::sync::Arc;
/// use gpu_driver::{Bytes, Driver, DriverError, Faulty, HostDriver, HostOptions, Verb};
///
/// let host = Arc::new(HostDriver::new(HostOptions::new(Bytes::mib(16)))?);
/// let driver = Faulty::new(host.clone());
/// driver.fail(Verb::CreatePages, 1);
/// let first = driver.create_pages(Bytes::mib(1))?;
/// assert!(matches!(driver.create_pages(Bytes::mib(1)), Err(DriverError::Injected { index: 1, .. })));
/// assert_eq!((driver.calls(Verb::CreatePages), host.counters().pages_alive), (2, 1));
/// // SAFETY: made above, released once.
/// unsafe { driver.release_pages(first) }?;
/// # Ok::<(), DriverError>(())
/// ```
#[derive(Debug)]
pub struct Faulty<D: ?Sized> {
    counts: VerbCounts,
    script: Mutex<Script>,
    inner: Arc<D>,
}

impl<D: Driver + ?Sized> Faulty<D> {
    /// Wraps a driver; nothing fails yet.
    pub fn new(inner: Arc<D>) -> Self {
        Self { counts: VerbCounts::new(), script: Mutex::default(), inner }
    }

    /// The driver behind.
    pub const fn inner(&self) -> &Arc<D> {
        &self.inner
    }

    /// Makes call `index` of `verb` fail with [`DriverError::Injected`]. Calls count from 0, from creation or the
    /// last [`reset`](Self::reset).
    pub fn fail(&self, verb: Verb, index: u64) {
        self.fail_with(verb, index, DriverError::Injected { verb: verb.name(), index });
    }

    /// Makes call `index` of `verb` fail with `error`.
    pub fn fail_with(&self, verb: Verb, index: u64, error: DriverError) {
        self.script().faults.push(Fault { verb, index, error, stays: false });
    }

    /// As [`fail_with`](Self::fail_with), and the error stays pending: the next call reports it again, whichever it is, and
    /// does not reach the driver behind. So do layers that keep the last error of a thread.
    pub fn fail_pending(&self, verb: Verb, index: u64, error: DriverError) {
        self.script().faults.push(Fault { verb, index, error, stays: true });
    }

    /// Whether an error stayed that no call has reported yet.
    pub fn is_pending(&self) -> bool {
        self.script().pending.is_some()
    }

    /// Refuses to register more than `longest` in one call; zero refuses every registration.
    pub fn refuse_registrations_above(&self, longest: Bytes) {
        self.script().longest_registration = Some(longest);
    }

    /// How often `verb` was called, failed calls included.
    pub fn calls(&self, verb: Verb) -> u64 {
        self.counts.get(verb)
    }

    /// Starts a fresh record of the calls to come.
    pub fn record(&self) {
        let mut script = self.script();
        script.recording = true;
        script.record.clear();
    }

    /// The calls since [`record`](Self::record), in order, failed ones included.
    pub fn recorded(&self) -> Vec<Verb> {
        self.script().record.clone()
    }

    /// Forgets the faults, the counts and the record.
    pub fn reset(&self) {
        let mut script = self.script();
        *script = Script::default();
        self.counts.reset();
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a call and says whether it may go on.
    fn enter(&self, verb: Verb) -> Result<()> {
        let mut script = self.script();
        let index = self.counts.add(verb);
        if script.recording {
            script.record.push(verb);
        }
        if let Some(pending) = script.pending.take() {
            return Err(pending);
        }
        let fault = script.faults.iter().find(|fault| fault.verb == verb && fault.index == index);
        let Some(Fault { error, stays, .. }) = fault.cloned() else { return Ok(()) };
        script.pending = stays.then(|| error.clone());
        Err(error)
    }
}

impl<D: Driver + ?Sized> Driver for Faulty<D> {
    fn device_info(&self) -> &DeviceInfo {
        self.inner.device_info()
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.enter(Verb::MemoryInfo)?;
        self.inner.memory_info()
    }

    fn reserve_address(&self, size: Bytes, alignment: Bytes) -> Result<DeviceAddress> {
        self.enter(Verb::ReserveAddress)?;
        self.inner.reserve_address(size, alignment)
    }

    unsafe fn free_address(&self, address: DeviceAddress, size: Bytes) -> Result<()> {
        self.enter(Verb::FreeAddress)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.free_address(address, size) }
    }

    fn create_pages(&self, size: Bytes) -> Result<PageHandle> {
        self.enter(Verb::CreatePages)?;
        self.inner.create_pages(size)
    }

    unsafe fn release_pages(&self, pages: PageHandle) -> Result<()> {
        self.enter(Verb::ReleasePages)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.release_pages(pages) }
    }

    unsafe fn map_pages(&self, address: DeviceAddress, size: Bytes, pages: PageHandle) -> Result<()> {
        self.enter(Verb::MapPages)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.map_pages(address, size, pages) }
    }

    unsafe fn unmap_pages(&self, address: DeviceAddress, size: Bytes) -> Result<()> {
        self.enter(Verb::UnmapPages)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.unmap_pages(address, size) }
    }

    unsafe fn set_access(&self, address: DeviceAddress, size: Bytes, access: Access) -> Result<()> {
        self.enter(Verb::SetAccess)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.set_access(address, size, access) }
    }

    fn create_stream(&self) -> Result<StreamHandle> {
        self.enter(Verb::CreateStream)?;
        self.inner.create_stream()
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        self.enter(Verb::DestroyStream)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.destroy_stream(stream) }
    }

    fn synchronize_stream(&self, stream: StreamHandle) -> Result<()> {
        self.enter(Verb::SynchronizeStream)?;
        self.inner.synchronize_stream(stream)
    }

    fn is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        self.enter(Verb::IsCapturing)?;
        self.inner.is_capturing(stream)
    }

    fn create_event(&self) -> Result<EventHandle> {
        self.enter(Verb::CreateEvent)?;
        self.inner.create_event()
    }

    fn create_timer(&self) -> Result<EventHandle> {
        self.enter(Verb::CreateTimer)?;
        self.inner.create_timer()
    }

    fn elapsed(&self, start: EventHandle, end: EventHandle) -> Result<Option<f64>> {
        self.enter(Verb::Elapsed)?;
        self.inner.elapsed(start, end)
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()> {
        self.enter(Verb::DestroyEvent)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.destroy_event(event) }
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.enter(Verb::RecordEvent)?;
        self.inner.record_event(event, stream)
    }

    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.enter(Verb::WaitEvent)?;
        self.inner.wait_event(stream, event)
    }

    fn query_event(&self, event: EventHandle) -> Result<bool> {
        self.enter(Verb::QueryEvent)?;
        self.inner.query_event(event)
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        self.enter(Verb::SynchronizeEvent)?;
        self.inner.synchronize_event(event)
    }

    unsafe fn register_host(&self, address: *mut u8, size: Bytes, registration: Registration) -> Result<()> {
        self.enter(Verb::RegisterHost)?;
        let longest = self.script().longest_registration;
        if longest.is_some_and(|longest| size > longest) {
            return Err(DriverError::Call {
                call: "register_host",
                code: 2,
                name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
                detail: format!(": {size} at {address:?}"),
            });
        }
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.register_host(address, size, registration) }
    }

    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        self.enter(Verb::UnregisterHost)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.unregister_host(address) }
    }

    unsafe fn copy_to_device(&self, copies: &[HostToDevice], stream: StreamHandle) -> Result<()> {
        let entered = self.enter(Verb::CopyToDevice);
        let allowed = if entered.is_ok() { copies } else { &copies[..copies.len() / 2] };
        if entered.is_ok() || !allowed.is_empty() {
            // SAFETY: the caller keeps this verb's contract.
            unsafe { self.inner.copy_to_device(allowed, stream) }?;
        }
        entered
    }

    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: DeviceAddress,
        size: Bytes,
        stream: StreamHandle,
    ) -> Result<()> {
        self.enter(Verb::CopyToHost)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.copy_to_host(target, source, size, stream) }
    }

    unsafe fn fill(
        &self,
        address: DeviceAddress,
        size: Bytes,
        value: u8,
        stream: StreamHandle,
    ) -> Result<()> {
        self.enter(Verb::Fill)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.fill(address, size, value, stream) }
    }

    unsafe fn load_module(&self, image: &CStr) -> Result<ModuleHandle> {
        self.enter(Verb::LoadModule)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.load_module(image) }
    }

    unsafe fn unload_module(&self, module: ModuleHandle) -> Result<()> {
        self.enter(Verb::UnloadModule)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.unload_module(module) }
    }

    unsafe fn find_kernel(&self, module: ModuleHandle, name: &CStr) -> Result<KernelHandle> {
        self.enter(Verb::FindKernel)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.find_kernel(module, name) }
    }

    unsafe fn launch(
        &self,
        kernel: KernelHandle,
        grid: LaunchGrid,
        arguments: &[KernelArgument<'_>],
        stream: StreamHandle,
    ) -> Result<()> {
        self.enter(Verb::Launch)?;
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.inner.launch(kernel, grid, arguments, stream) }
    }
}
