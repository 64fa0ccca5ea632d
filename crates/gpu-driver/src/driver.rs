//! The seam: every verb of a device driver that weight streaming needs, and nothing else.
//!
//! ```text
//!   reserve_address ── map_pages ── set_access        addresses: costs no memory
//!                          │
//!   create_pages ──────────┘                          memory: has no address
//!
//!   copy stream    wait(last use) ─ copy ─ record(copied)
//!   compute stream              wait(copied) ─ kernels ─ record(last use)
//! ```
//!
//! The trait is object safe: everything above holds an `Arc<dyn Driver>` and runs unchanged on CUDA and on the
//! emulator. Verbs that can free, alias or overwrite memory are `unsafe`; their callers are the RAII types of
//! vmm-alloc and pinned-pool.

use std::ffi::CStr;
use std::fmt::Debug;

use crate::error::Result;
use crate::module::{KernelArgument, LaunchGrid};
use crate::types::{
    Access, Bytes, DeviceAddress, DeviceInfo, EventHandle, HostToDevice, KernelHandle, MemoryInfo,
    ModuleHandle, PageHandle, Registration, StreamHandle,
};

/// A device's driver: CUDA's, or the host emulator.
///
/// Any thread may call any verb at any time. An error leaves nothing behind: the verb happened or it did not.
pub trait Driver: Debug + Send + Sync {
    /// What the device is and can do, read once when the driver was opened.
    fn device_info(&self) -> &DeviceInfo;

    /// How much memory is free now.
    fn memory_info(&self) -> Result<MemoryInfo>;

    /// Reserves `size` bytes of addresses, aligned to `alignment` (a power of two). Costs no memory.
    ///
    /// `size` is a multiple of the granularity.
    fn reserve_address(&self, size: Bytes, alignment: Bytes) -> Result<DeviceAddress>;

    /// Gives back a whole reservation.
    ///
    /// # Safety
    /// `address` and `size` are those of one `reserve_address` of this driver, nothing is mapped in it, and no
    /// submitted work uses it.
    unsafe fn free_address(&self, address: DeviceAddress, size: Bytes) -> Result<()>;

    /// Makes `size` bytes of physical memory, a multiple of the granularity. Its content is undefined.
    fn create_pages(&self, size: Bytes) -> Result<PageHandle>;

    /// Gives physical memory back; it is freed when the last mapping of it is gone.
    ///
    /// # Safety
    /// `pages` came from `create_pages` of this driver and was not released before.
    unsafe fn release_pages(&self, pages: PageHandle) -> Result<()>;

    /// Maps the whole of `pages`, which is `size` bytes, at `address`. One handle may be mapped at many addresses.
    /// The addresses are inaccessible until [`set_access`](Self::set_access).
    ///
    /// # Safety
    /// `address..address + size` lies in one reservation of this driver and nothing is mapped there; `pages` is
    /// alive.
    unsafe fn map_pages(&self, address: DeviceAddress, size: Bytes, pages: PageHandle) -> Result<()>;

    /// Takes every mapping inside `address..address + size` away. Does not wait for the device.
    ///
    /// # Safety
    /// The range is a run of whole mappings without a gap, and no submitted work uses it.
    unsafe fn unmap_pages(&self, address: DeviceAddress, size: Bytes) -> Result<()>;

    /// Sets what this device may do at the mapped range `address..address + size`, which may span many mappings.
    ///
    /// # Safety
    /// The range is a run of whole mappings without a gap; with [`Access::None`], no submitted work uses it.
    unsafe fn set_access(&self, address: DeviceAddress, size: Bytes, access: Access) -> Result<()>;

    /// Makes a copy stream, which runs beside the compute stream.
    fn create_stream(&self) -> Result<StreamHandle>;

    /// Ends a stream made by [`create_stream`](Self::create_stream).
    ///
    /// # Safety
    /// `stream` is one of this driver's own, not destroyed before, and idle.
    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()>;

    /// Blocks the calling thread until everything submitted to `stream` has run. Reports an error of that work.
    fn synchronize_stream(&self, stream: StreamHandle) -> Result<()>;

    /// Whether `stream` is being captured into a graph by somebody.
    fn is_capturing(&self, stream: StreamHandle) -> Result<bool>;

    /// Makes an event. A new event counts as completed.
    fn create_event(&self) -> Result<EventHandle>;

    /// Makes an event that also keeps the time at which its latest record was reached; costs more to record.
    fn create_timer(&self) -> Result<EventHandle>;

    /// The seconds from the latest record of one event made by [`create_timer`](Self::create_timer) to that of another;
    /// `None` while one of them has not been reached. Never blocks. CUDA's clock has a resolution of about 0.5 µs.
    ///
    /// # Errors
    /// An event that is no timer, or was never recorded.
    fn elapsed(&self, start: EventHandle, end: EventHandle) -> Result<Option<f64>>;

    /// Ends an event.
    ///
    /// # Safety
    /// `event` is one of this driver's own and not destroyed before.
    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()>;

    /// Marks the end of what `stream` holds now. Waits submitted earlier keep meaning the earlier mark.
    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;

    /// Makes later work of `stream` wait for the event's latest record. The host goes on, except on the emulator's
    /// compute stream, which is the calling thread.
    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;

    /// Whether the event's latest record has been reached.
    fn query_event(&self, event: EventHandle) -> Result<bool>;

    /// Blocks the calling thread until the event's latest record has been reached.
    fn synchronize_event(&self, event: EventHandle) -> Result<()>;

    /// Page-locks `size` bytes at `address` so that the copy engine reads them directly.
    ///
    /// # Safety
    /// The range is whole pages of mapped memory that stays mapped until `unregister_host`, and is not a private
    /// file mapping (registering one does not return).
    unsafe fn register_host(&self, address: *mut u8, size: Bytes, registration: Registration) -> Result<()>;

    /// Unlocks memory. Must come before that memory is freed.
    ///
    /// # Safety
    /// `address` is that of a `register_host` still in force, and no submitted copy reads the range.
    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()>;

    /// Copies host memory to the device, in the order of `stream`. Several entries go as one batch where the driver
    /// can, in any order among themselves. Either all of them were submitted or, on an error, some may have been:
    /// synchronize before reuse.
    ///
    /// # Safety
    /// Every target is mapped with write access, every source is readable and lies in one registration or touches
    /// none, and both stay so until the copies have run; the targets do not overlap, and nothing else writes them
    /// meanwhile.
    unsafe fn copy_to_device(&self, copies: &[HostToDevice], stream: StreamHandle) -> Result<()>;

    /// Copies device memory to the host on `stream`.
    ///
    /// # Safety
    /// `source..source + size` is mapped, `target` is writable for `size` bytes, and both stay so until the copy
    /// has run.
    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: DeviceAddress,
        size: Bytes,
        stream: StreamHandle,
    ) -> Result<()>;

    /// Sets `size` bytes at `address` to `value` on `stream`. Used to poison memory so that a missing wait shows.
    ///
    /// # Safety
    /// The range is mapped with write access until the fill has run, and nothing else uses it meanwhile.
    unsafe fn fill(&self, address: DeviceAddress, size: Bytes, value: u8, stream: StreamHandle)
    -> Result<()>;

    /// Loads a module of kernels into the device's context: PTX, which the driver compiles, or machine code.
    ///
    /// # Errors
    /// [`NoKernels`](crate::DriverError::NoKernels) where there can be none, and
    /// [`ModuleRefused`](crate::DriverError::ModuleRefused) for what this driver or device cannot take.
    ///
    /// # Safety
    /// `image` is terminated PTX or a whole image of machine code.
    unsafe fn load_module(&self, image: &CStr) -> Result<ModuleHandle>;

    /// Unloads a module, and with it its kernels. Does not wait for the device.
    ///
    /// # Safety
    /// `module` came from [`load_module`](Self::load_module) of this driver and was not unloaded before, and nothing of
    /// it still runs.
    unsafe fn unload_module(&self, module: ModuleHandle) -> Result<()>;

    /// Finds a kernel of a module by its name.
    ///
    /// # Safety
    /// `module` is loaded.
    unsafe fn find_kernel(&self, module: ModuleHandle, name: &CStr) -> Result<KernelHandle>;

    /// Submits a kernel to `stream`, which may be somebody else's.
    ///
    /// # Safety
    /// The kernel's module is loaded until the kernel has run; the arguments are those of the kernel, in number, order
    /// and size; the memory they lead to is mapped, and is not written by others, until the kernel has run; `stream`
    /// belongs to this device.
    unsafe fn launch(
        &self,
        kernel: KernelHandle,
        grid: LaunchGrid,
        arguments: &[KernelArgument<'_>],
        stream: StreamHandle,
    ) -> Result<()>;
}
