//! The verbs of [`Driver`] on CUDA: one driver call each, in the device's context.

use std::ffi::{CStr, c_uint, c_void};

use cudarc::driver::sys::{
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY, CUevent_flags_enum as EventFlags,
    CUmemAccess_flags_enum as AccessFlags, CUmemAccessDesc, CUstream_flags_enum as StreamFlags,
};

use super::api::{Code, NOT_READY, OUT_OF_MEMORY};
use super::context::Current;
use super::{CudaDriver, pages_at};
use crate::contract::{aligned_address, power_of_two, whole_granules};
use crate::driver::Driver;
use crate::error::{DriverError, Result};
use crate::module::{KernelArgument, LaunchGrid};
use crate::types::{
    Access, Bytes, DeviceAddress, DeviceInfo, EventHandle, HostToDevice, KernelHandle, MemoryInfo,
    ModuleHandle, PageHandle, Registration, StreamHandle,
};

impl CudaDriver {
    /// Asks in a context that is current already.
    fn read_memory_info(&self, _current: &Current<'_>) -> Result<MemoryInfo> {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: both pointers are valid for the write.
        let code = unsafe { (self.api.memory_info)(&raw mut free, &raw mut total) };
        self.api.check("cuMemGetInfo", code, String::new)?;
        Ok(MemoryInfo { free: Bytes(free as u64), total: Bytes(total as u64) })
    }

    /// As the driver's own check, with memory running out told apart.
    fn check_memory(
        &self,
        current: &Current<'_>,
        call: &'static str,
        code: Code,
        asked: Bytes,
        detail: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == OUT_OF_MEMORY
            && let Ok(MemoryInfo { free, total }) = self.read_memory_info(current)
        {
            return Err(DriverError::OutOfMemory { asked, free, total });
        }
        self.api.check(call, code, detail)
    }

    fn read_capturing(&self, _current: &Current<'_>, stream: StreamHandle) -> Result<bool> {
        let mut status: c_uint = 0;
        // SAFETY: the pointer is valid for the write; the stream is a live one of this context.
        let code = unsafe { (self.api.stream_is_capturing)(stream.0, &raw mut status) };
        self.api.check("cuStreamIsCapturing", code, || format!(": {stream:?}"))?;
        Ok(status != 0)
    }
}

impl CudaDriver {
    fn new_event(&self, flags: c_uint) -> Result<EventHandle> {
        let _current = self.context.enter()?;
        let mut event = 0;
        // SAFETY: the pointer is valid for the write.
        let code = unsafe { (self.api.event_create)(&raw mut event, flags) };
        self.api.check("cuEventCreate", code, String::new)?;
        Ok(EventHandle(event))
    }
}

impl Driver for CudaDriver {
    fn device_info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        let current = self.context.enter()?;
        self.read_memory_info(&current)
    }

    fn reserve_address(&self, size: Bytes, alignment: Bytes) -> Result<DeviceAddress> {
        whole_granules("reserve_address", size, self.info.granularity)?;
        power_of_two("reserve_address", alignment)?;
        let alignment = alignment.max(self.info.granularity);
        let _current = self.context.enter()?;
        let mut address = 0;
        // SAFETY: the pointer is valid for the write; the address is left to the driver.
        let code = unsafe {
            (self.api.address_reserve)(&raw mut address, size.as_usize(), alignment.as_usize(), 0, 0)
        };
        self.api.check("cuMemAddressReserve", code, || format!(": {size} aligned to {alignment}"))?;
        Ok(DeviceAddress(address))
    }

    unsafe fn free_address(&self, address: DeviceAddress, size: Bytes) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches for a whole, unmapped and unused reservation.
        let code = unsafe { (self.api.address_free)(address.0, size.as_usize()) };
        self.api.check("cuMemAddressFree", code, || format!(": {size} at {address:?}"))
    }

    fn create_pages(&self, size: Bytes) -> Result<PageHandle> {
        whole_granules("create_pages", size, self.info.granularity)?;
        let current = self.context.enter()?;
        let pages = pages_at(self.location);
        let mut handle = 0;
        // SAFETY: both pointers are valid for the call.
        let code = unsafe { (self.api.pages_create)(&raw mut handle, size.as_usize(), &raw const pages, 0) };
        self.check_memory(&current, "cuMemCreate", code, size, || format!(": {size}"))?;
        Ok(PageHandle(handle))
    }

    unsafe fn release_pages(&self, pages: PageHandle) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches for a live handle of ours.
        let code = unsafe { (self.api.pages_release)(pages.0) };
        self.api.check("cuMemRelease", code, || format!(": {pages:?}"))
    }

    unsafe fn map_pages(&self, address: DeviceAddress, size: Bytes, pages: PageHandle) -> Result<()> {
        whole_granules("map_pages", size, self.info.granularity)?;
        aligned_address("map_pages", address, self.info.granularity)?;
        let current = self.context.enter()?;
        // SAFETY: the caller vouches for an empty part of a reservation and a live handle of this size.
        let code = unsafe { (self.api.map)(address.0, size.as_usize(), 0, pages.0, 0) };
        self.check_memory(&current, "cuMemMap", code, size, || format!(": {size} at {address:?}, {pages:?}"))
    }

    unsafe fn unmap_pages(&self, address: DeviceAddress, size: Bytes) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches for whole mappings that no work uses.
        let code = unsafe { (self.api.unmap)(address.0, size.as_usize()) };
        self.api.check("cuMemUnmap", code, || format!(": {size} at {address:?}"))
    }

    unsafe fn set_access(&self, address: DeviceAddress, size: Bytes, access: Access) -> Result<()> {
        let current = self.context.enter()?;
        let flags = match access {
            Access::None => AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_NONE,
            Access::ReadWrite => AccessFlags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        let wanted = CUmemAccessDesc { location: self.location, flags };
        // SAFETY: the caller vouches for a range that is mapped throughout; the description outlives the call.
        let code = unsafe { (self.api.set_access)(address.0, size.as_usize(), &raw const wanted, 1) };
        self.check_memory(&current, "cuMemSetAccess", code, size, || {
            format!(": {access:?} for {size} at {address:?}")
        })
    }

    fn create_stream(&self) -> Result<StreamHandle> {
        let _current = self.context.enter()?;
        let mut stream = 0;
        // It must not order itself against the legacy default stream, on which the caller may compute.
        let flags = StreamFlags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the pointer is valid for the write.
        let code = unsafe { (self.api.stream_create)(&raw mut stream, flags) };
        self.api.check("cuStreamCreate", code, String::new)?;
        Ok(StreamHandle(stream))
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches for a live, idle stream of ours.
        let code = unsafe { (self.api.stream_destroy)(stream.0) };
        self.api.check("cuStreamDestroy", code, || format!(": {stream:?}"))
    }

    fn synchronize_stream(&self, stream: StreamHandle) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: a stream handle is a live stream of this context.
        let code = unsafe { (self.api.stream_synchronize)(stream.0) };
        self.api.check("cuStreamSynchronize", code, || format!(": {stream:?}"))
    }

    fn is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        let current = self.context.enter()?;
        self.read_capturing(&current, stream)
    }

    fn create_event(&self) -> Result<EventHandle> {
        self.new_event(EventFlags::CU_EVENT_DISABLE_TIMING as c_uint)
    }

    fn create_timer(&self) -> Result<EventHandle> {
        self.new_event(EventFlags::CU_EVENT_DEFAULT as c_uint)
    }

    fn elapsed(&self, start: EventHandle, end: EventHandle) -> Result<Option<f64>> {
        let _current = self.context.enter()?;
        let mut milliseconds = 0.0_f32;
        // SAFETY: handles are live ones of this context; the pointer is valid for the write.
        let code = unsafe { (self.api.event_elapsed)(&raw mut milliseconds, start.0, end.0) };
        if code == NOT_READY {
            return Ok(None);
        }
        self.api.check("cuEventElapsedTime", code, || format!(": from {start:?} to {end:?}"))?;
        Ok(Some(f64::from(milliseconds) * 1e-3))
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches for a live event of ours.
        let code = unsafe { (self.api.event_destroy)(event.0) };
        self.api.check("cuEventDestroy", code, || format!(": {event:?}"))
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: handles are live ones of this context.
        let code = unsafe { (self.api.event_record)(event.0, stream.0) };
        self.api.check("cuEventRecord", code, || format!(": {event:?} on {stream:?}"))
    }

    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: handles are live ones of this context.
        let code = unsafe { (self.api.stream_wait)(stream.0, event.0, 0) };
        self.api.check("cuStreamWaitEvent", code, || format!(": {stream:?} for {event:?}"))
    }

    fn query_event(&self, event: EventHandle) -> Result<bool> {
        let _current = self.context.enter()?;
        // SAFETY: the handle is a live one of this context.
        let code = unsafe { (self.api.event_query)(event.0) };
        if code == NOT_READY {
            return Ok(false);
        }
        self.api.check("cuEventQuery", code, || format!(": {event:?}"))?;
        Ok(true)
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the handle is a live one of this context.
        let code = unsafe { (self.api.event_synchronize)(event.0) };
        self.api.check("cuEventSynchronize", code, || format!(": {event:?}"))
    }

    unsafe fn register_host(&self, address: *mut u8, size: Bytes, registration: Registration) -> Result<()> {
        let access = match registration {
            Registration::ReadWrite => 0,
            Registration::ReadOnly if self.info.read_only_registration => CU_MEMHOSTREGISTER_READ_ONLY,
            Registration::ReadOnly => {
                return Err(DriverError::Unsupported {
                    device: self.info.name.clone(),
                    feature: "read-only registration of host memory",
                });
            }
        };
        let _current = self.context.enter()?;
        let flags = CU_MEMHOSTREGISTER_PORTABLE | access;
        // SAFETY: the caller vouches for whole pages that stay mapped until they are unregistered.
        let code = unsafe { (self.api.register)(address.cast::<c_void>(), size.as_usize(), flags) };
        self.api.check("cuMemHostRegister", code, || format!(": {registration:?}, {size} at {address:?}"))
    }

    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches that no submitted copy uses the range.
        let code = unsafe { (self.api.unregister)(address.cast::<c_void>()) };
        self.api.check("cuMemHostUnregister", code, || format!(": {address:?}"))
    }

    unsafe fn copy_to_device(&self, copies: &[HostToDevice], stream: StreamHandle) -> Result<()> {
        let current = self.context.enter()?;
        let capturing = || self.read_capturing(&current, stream);
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.copies.submit(&self.api, copies, stream, capturing) }
    }

    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: DeviceAddress,
        size: Bytes,
        stream: StreamHandle,
    ) -> Result<()> {
        if size == Bytes::ZERO {
            return Ok(());
        }
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches for both ranges until the copy has run.
        let code =
            unsafe { (self.api.copy_to_host)(target.cast::<c_void>(), source.0, size.as_usize(), stream.0) };
        self.api.check("cuMemcpyDtoHAsync", code, || format!(": {size} from {source:?} to {target:?}"))
    }

    unsafe fn fill(
        &self,
        address: DeviceAddress,
        size: Bytes,
        value: u8,
        stream: StreamHandle,
    ) -> Result<()> {
        if size == Bytes::ZERO {
            return Ok(());
        }
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches for the range until the fill has run.
        let code = unsafe { (self.api.fill)(address.0, value, size.as_usize(), stream.0) };
        self.api.check("cuMemsetD8Async", code, || format!(": {size} at {address:?}"))
    }

    unsafe fn load_module(&self, image: &CStr) -> Result<ModuleHandle> {
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.module(image) }
    }

    unsafe fn unload_module(&self, module: ModuleHandle) -> Result<()> {
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.unload(module) }
    }

    unsafe fn find_kernel(&self, module: ModuleHandle, name: &CStr) -> Result<KernelHandle> {
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.kernel(module, name) }
    }

    unsafe fn launch(
        &self,
        kernel: KernelHandle,
        grid: LaunchGrid,
        arguments: &[KernelArgument<'_>],
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: the caller keeps this verb's contract.
        unsafe { self.submit(kernel, grid, arguments, stream) }
    }
}
