//! The verbs of [`Driver`] on the emulator: check the contract, then act.

use std::ffi::CStr;
use std::sync::Arc;

use super::work::{Action, Link, Transfer};
use super::{HostDriver, Tables, kinds};
use crate::contract;
use crate::driver::Driver;
use crate::error::{DriverError, Result};
use crate::host::queue::{Share, Work};
use crate::host::streams::Refusal;
use crate::module::{KernelArgument, LaunchGrid};
use crate::platform;
use crate::types::{
    Access, Bytes, DeviceAddress, DeviceInfo, EventHandle, HostToDevice, KernelHandle, MemoryInfo,
    ModuleHandle, PageHandle, Registration, StreamHandle,
};
use crate::verb::Verb;

fn refuse<T>(call: Verb, what: String) -> Result<T> {
    contract::refuse(call.name(), what)
}

impl HostDriver {
    /// The answer to every verb of kernels.
    fn no_kernels<T>(&self, verb: Verb) -> Result<T> {
        self.calls.add(verb);
        Err(DriverError::NoKernels { device: self.info.name.clone() })
    }

    /// `None` for the compute stream, else one of our own.
    fn copy_stream(&self, call: Verb, stream: StreamHandle) -> Result<Option<u64>> {
        if stream == StreamHandle::DEFAULT {
            return Ok(None);
        }
        if self.streams.queue().has_stream(stream.0) {
            return Ok(Some(stream.0));
        }
        refuse(call, format!("{stream:?}, which is not a stream of this device"))
    }

    fn check_event(&self, call: Verb, event: EventHandle) -> Result<()> {
        if self.streams.queue().has_event(event.0) {
            return Ok(());
        }
        refuse(call, format!("{event:?}, which is not alive"))
    }

    /// Refuses to take a device range away from copies that still use it.
    fn check_unused(&self, call: Verb, address: DeviceAddress, size: Bytes) -> Result<()> {
        let user = self.streams.queue().find_pending(|work| work.touches_device(address, size));
        match user {
            Some(work) => refuse(
                call,
                format!("{size} at {address:?}; a submitted copy of {} still uses it", work.size),
            ),
            None => Ok(()),
        }
    }

    /// Submits checked work, or does it at once on the compute stream.
    fn submit(&self, tables: std::sync::MutexGuard<'_, Tables>, stream: Option<u64>, works: Vec<Transfer>) {
        let Some(stream) = stream else {
            // The calling thread is the device here: nothing else needs the tables for it.
            drop(tables);
            for work in works {
                work.run(Share::All);
            }
            return;
        };
        self.streams.change(|queue| {
            for work in works {
                queue.submit_work(stream, work);
            }
        });
    }

    fn transfer(&self, action: Action, size: Bytes) -> Transfer {
        let link: Option<&Arc<Link>> = match action {
            Action::ToDevice { .. } => self.to_device.as_ref(),
            Action::ToHost { .. } => self.to_host.as_ref(),
            Action::Fill { .. } => None,
        };
        Transfer { action, size, link: link.cloned() }
    }
}

impl Driver for HostDriver {
    fn device_info(&self) -> &DeviceInfo {
        &self.info
    }

    fn memory_info(&self) -> Result<MemoryInfo> {
        self.calls.add(Verb::MemoryInfo);
        Ok(self.tables().memory.info())
    }

    fn reserve_address(&self, size: Bytes, alignment: Bytes) -> Result<DeviceAddress> {
        self.calls.add(Verb::ReserveAddress);
        self.tables().memory.reserve(size, alignment)
    }

    unsafe fn free_address(&self, address: DeviceAddress, size: Bytes) -> Result<()> {
        self.calls.add(Verb::FreeAddress);
        self.tables().memory.free(address, size)
    }

    fn create_pages(&self, size: Bytes) -> Result<PageHandle> {
        self.calls.add(Verb::CreatePages);
        self.tables().memory.create(size)
    }

    unsafe fn release_pages(&self, pages: PageHandle) -> Result<()> {
        self.calls.add(Verb::ReleasePages);
        self.tables().memory.release(pages)
    }

    unsafe fn map_pages(&self, address: DeviceAddress, size: Bytes, pages: PageHandle) -> Result<()> {
        self.calls.add(Verb::MapPages);
        self.tables().memory.map(address, size, pages)
    }

    unsafe fn unmap_pages(&self, address: DeviceAddress, size: Bytes) -> Result<()> {
        self.calls.add(Verb::UnmapPages);
        let mut tables = self.tables();
        self.check_unused(Verb::UnmapPages, address, size)?;
        tables.memory.unmap(address, size)
    }

    unsafe fn set_access(&self, address: DeviceAddress, size: Bytes, access: Access) -> Result<()> {
        self.calls.add(Verb::SetAccess);
        let mut tables = self.tables();
        if access == Access::None {
            self.check_unused(Verb::SetAccess, address, size)?;
        }
        tables.memory.protect(address, size, access)
    }

    fn create_stream(&self) -> Result<StreamHandle> {
        self.calls.add(Verb::CreateStream);
        let created = self.streams.create();
        created
            .map(StreamHandle)
            .map_err(|error| DriverError::System { call: "thread spawn", message: error.to_string() })
    }

    unsafe fn destroy_stream(&self, stream: StreamHandle) -> Result<()> {
        self.calls.add(Verb::DestroyStream);
        match self.streams.destroy(stream.0) {
            Ok(()) => Ok(()),
            Err(Refusal::Unknown) => {
                refuse(Verb::DestroyStream, format!("{stream:?}, which is not alive or not a copy stream"))
            }
            Err(Refusal::Busy) => {
                refuse(Verb::DestroyStream, format!("{stream:?}, which still has work; synchronize it first"))
            }
        }
    }

    fn synchronize_stream(&self, stream: StreamHandle) -> Result<()> {
        self.calls.add(Verb::SynchronizeStream);
        let stream = self.copy_stream(Verb::SynchronizeStream, stream)?;
        let mark = stream.and_then(|stream| self.streams.queue().end(stream));
        if let Some(mark) = mark {
            self.streams.wait_for(mark);
        }
        Ok(())
    }

    fn is_capturing(&self, stream: StreamHandle) -> Result<bool> {
        self.calls.add(Verb::IsCapturing);
        self.copy_stream(Verb::IsCapturing, stream)?;
        Ok(false)
    }

    fn create_event(&self) -> Result<EventHandle> {
        self.calls.add(Verb::CreateEvent);
        Ok(EventHandle(self.streams.queue().add_event()))
    }

    fn create_timer(&self) -> Result<EventHandle> {
        self.calls.add(Verb::CreateTimer);
        Ok(EventHandle(self.streams.queue().add_timer()))
    }

    fn elapsed(&self, start: EventHandle, end: EventHandle) -> Result<Option<f64>> {
        self.calls.add(Verb::Elapsed);
        for event in [start, end] {
            self.check_event(Verb::Elapsed, event)?;
            if !self.streams.queue().keeps_time(event.0) {
                return refuse(Verb::Elapsed, format!("{event:?}, which is no timer or was never recorded"));
            }
        }
        Ok(self.streams.queue().elapsed(start.0, end.0))
    }

    unsafe fn destroy_event(&self, event: EventHandle) -> Result<()> {
        self.calls.add(Verb::DestroyEvent);
        if self.streams.queue().remove_event(event.0) {
            return Ok(());
        }
        refuse(Verb::DestroyEvent, format!("{event:?}, which is not alive"))
    }

    fn record_event(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        self.calls.add(Verb::RecordEvent);
        self.check_event(Verb::RecordEvent, event)?;
        let stream = self.copy_stream(Verb::RecordEvent, stream)?;
        self.streams.queue().record(event.0, stream);
        Ok(())
    }

    fn wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        self.calls.add(Verb::WaitEvent);
        self.check_event(Verb::WaitEvent, event)?;
        if let Some(stream) = self.copy_stream(Verb::WaitEvent, stream)? {
            self.streams.change(|queue| queue.submit_wait(stream, event.0));
            return Ok(());
        }
        self.wait_on_host(event);
        Ok(())
    }

    fn query_event(&self, event: EventHandle) -> Result<bool> {
        self.calls.add(Verb::QueryEvent);
        self.check_event(Verb::QueryEvent, event)?;
        Ok(self.streams.change(|queue| queue.query(event.0)))
    }

    fn synchronize_event(&self, event: EventHandle) -> Result<()> {
        self.calls.add(Verb::SynchronizeEvent);
        self.check_event(Verb::SynchronizeEvent, event)?;
        self.wait_on_host(event);
        Ok(())
    }

    unsafe fn register_host(&self, address: *mut u8, size: Bytes, registration: Registration) -> Result<()> {
        self.calls.add(Verb::RegisterHost);
        let start = address.addr() as u64;
        let mut tables = self.tables();
        tables.registrations.add(start, size, registration)?;
        let checked = match platform::memory_maps() {
            Some(maps) => kinds::check(&maps, start, size, registration),
            None => Ok(()),
        };
        if checked.is_err() {
            tables.registrations.remove(start);
        }
        checked
    }

    unsafe fn unregister_host(&self, address: *mut u8) -> Result<()> {
        self.calls.add(Verb::UnregisterHost);
        let start = address.addr() as u64;
        let mut tables = self.tables();
        let Some(size) = tables.registrations.size_at(start) else {
            return refuse(
                Verb::UnregisterHost,
                format!("{start:#x}, where no registration starts (register_host has not run)"),
            );
        };
        let user = self.streams.queue().find_pending(|work| work.touches_host(&(start..start + size.0)));
        if let Some(work) = user {
            return refuse(
                Verb::UnregisterHost,
                format!("{size} at {start:#x}; a submitted copy of {} still uses it", work.size),
            );
        }
        tables.registrations.remove(start);
        Ok(())
    }

    unsafe fn copy_to_device(&self, copies: &[HostToDevice], stream: StreamHandle) -> Result<()> {
        self.calls.add(Verb::CopyToDevice);
        let stream = self.copy_stream(Verb::CopyToDevice, stream)?;
        let tables = self.tables();
        let mut works = Vec::with_capacity(copies.len());
        for copy in copies.iter().filter(|copy| copy.size != Bytes::ZERO) {
            let call = Verb::CopyToDevice.name();
            tables.memory.check_usable(call, copy.target, copy.size)?;
            let source = copy.source.expose_provenance();
            tables.registrations.check_source(call, source as u64, copy.size)?;
            let guarded = tables.registrations.is_read_only(source as u64);
            works.push(self.transfer(Action::ToDevice { target: copy.target.0, source, guarded }, copy.size));
        }
        self.bytes_to_device.add(works.iter().map(|work| work.size).sum());
        self.submit(tables, stream, works);
        Ok(())
    }

    unsafe fn copy_to_host(
        &self,
        target: *mut u8,
        source: DeviceAddress,
        size: Bytes,
        stream: StreamHandle,
    ) -> Result<()> {
        self.calls.add(Verb::CopyToHost);
        let stream = self.copy_stream(Verb::CopyToHost, stream)?;
        if size == Bytes::ZERO {
            return Ok(());
        }
        let tables = self.tables();
        let target = target.expose_provenance();
        tables.memory.check_usable(Verb::CopyToHost.name(), source, size)?;
        tables.registrations.check_source(Verb::CopyToHost.name(), target as u64, size)?;
        let work = self.transfer(Action::ToHost { target, source: source.0 }, size);
        self.bytes_to_host.add(size);
        self.submit(tables, stream, vec![work]);
        Ok(())
    }

    unsafe fn fill(
        &self,
        address: DeviceAddress,
        size: Bytes,
        value: u8,
        stream: StreamHandle,
    ) -> Result<()> {
        self.calls.add(Verb::Fill);
        let stream = self.copy_stream(Verb::Fill, stream)?;
        if size == Bytes::ZERO {
            return Ok(());
        }
        let tables = self.tables();
        tables.memory.check_usable(Verb::Fill.name(), address, size)?;
        let work = self.transfer(Action::Fill { target: address.0, value }, size);
        self.bytes_filled.add(size);
        self.submit(tables, stream, vec![work]);
        Ok(())
    }

    unsafe fn load_module(&self, _image: &CStr) -> Result<ModuleHandle> {
        self.no_kernels(Verb::LoadModule)
    }

    unsafe fn unload_module(&self, _module: ModuleHandle) -> Result<()> {
        self.no_kernels(Verb::UnloadModule)
    }

    unsafe fn find_kernel(&self, _module: ModuleHandle, _name: &CStr) -> Result<KernelHandle> {
        self.no_kernels(Verb::FindKernel)
    }

    unsafe fn launch(
        &self,
        _kernel: KernelHandle,
        _grid: LaunchGrid,
        _arguments: &[KernelArgument<'_>],
        _stream: StreamHandle,
    ) -> Result<()> {
        self.no_kernels(Verb::Launch)
    }
}

impl HostDriver {
    /// Blocks the calling thread until the event's latest record is reached.
    fn wait_on_host(&self, event: EventHandle) {
        let mark = self.streams.queue().unreached(event.0);
        if let Some(mark) = mark {
            self.streams.wait_for(mark);
        }
    }
}
