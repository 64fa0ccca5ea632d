//! A driver library without a GPU: the functions of libcuda that the crate uses, over this process's memory.
//!
//! Compiled by `tests/fake_libcuda/mod.rs` with the compiler alone (no crates). It checks the arguments as the
//! real one does, keeps the layouts of its structs on its own, runs everything at once, and can be told to answer
//! any call with any code. Work is synchronous: the order of streams is the emulator's to test, not this one's.
#![allow(non_snake_case, clippy::missing_safety_doc)]

mod state;

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use state::*;

unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        size: usize,
        access: c_int,
        flags: c_int,
        file: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn munmap(at: *mut c_void, size: usize) -> c_int;
    fn mprotect(at: *mut c_void, size: usize, access: c_int) -> c_int;
    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
    fn ftruncate(file: c_int, size: i64) -> c_int;
    fn close(file: c_int) -> c_int;
}

/// Answers call `nth` (from 0, from now on) of a function with a code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_fail(name: *const c_char, nth: u64, code: u32) {
    let name = unsafe { text(name) };
    let mut state = state();
    let nth = state.counts.get(&name).copied().unwrap_or_default() + nth;
    state.faults.push((name, nth, code));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_set(name: *const c_char, value: i64) {
    let name = unsafe { text(name) };
    state().settings.insert(name, value);
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_count(name: *const c_char) -> u64 {
    let name = unsafe { text(name) };
    state().counts.get(&name).copied().unwrap_or_default()
}

/// Calls that needed a context and found none current.
#[unsafe(no_mangle)]
pub extern "C" fn fake_outside_context() -> u64 {
    state().outside_context
}

/// Everything made and not given back.
#[unsafe(no_mangle)]
pub extern "C" fn fake_alive() -> u64 {
    let state = state();
    let tables = state.pages.len() + state.reserved.len() + state.mapped.len() + state.registered.len();
    (tables + state.streams.len() + state.events.len() + state.modules.len()) as u64 + state.retained.unsigned_abs()
}

macro_rules! functions {
    ($context:literal: $($(#[$gate:meta])* fn $name:ident($($argument:ident: $type:ty),*) $body:block)*) => {$(
        $(#[$gate])*
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> u32 {
            #[allow(unused_unsafe)]
            let act = || -> Result<(), u32> {
                enter(stringify!($name), $context)?;
                unsafe { $body }
            };
            act().err().unwrap_or(0)
        }
    )*};
}

functions! { false:
    fn cuInit(flags: c_uint) { need(flags == 0) }
    fn cuDriverGetVersion(version: *mut c_int) { *version = setting("version") as c_int; Ok(()) }
    fn cuDeviceGetCount(count: *mut c_int) { *count = setting("devices") as c_int; Ok(()) }
    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        need(i64::from(ordinal) < setting("devices"))?;
        *device = ordinal;
        Ok(())
    }
    fn cuDeviceGetName(name: *mut c_char, size: c_int, device: c_int) {
        let text = format!("Fake GPU {device}\0");
        need(text.len() <= size as usize)?;
        std::ptr::copy(text.as_ptr().cast(), name, text.len());
        Ok(())
    }
    fn cuDeviceTotalMem_v2(size: *mut usize, _device: c_int) { *size = TOTAL; Ok(()) }
    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, _device: c_int) {
        *value = match attribute {
            102 => setting("vmm") as c_int,
            113 => setting("read_only") as c_int,
            _ => return Err(1),
        };
        Ok(())
    }
    fn cuGetErrorName(code: u32, name: *mut *const c_char) {
        let known = match code {
            1 => c"CUDA_ERROR_INVALID_VALUE",
            2 => c"CUDA_ERROR_OUT_OF_MEMORY",
            218 => c"CUDA_ERROR_INVALID_PTX",
            222 => c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
            700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
            712 => c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
            713 => c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
            999 => c"CUDA_ERROR_UNKNOWN",
            _ => { *name = std::ptr::null(); return Err(1); }
        };
        *name = known.as_ptr();
        Ok(())
    }
    fn cuDevicePrimaryCtxRetain(context: *mut u64, _device: c_int) {
        state().retained += 1;
        *context = CONTEXT;
        Ok(())
    }
    fn cuDevicePrimaryCtxRelease_v2(_device: c_int) { state().retained -= 1; Ok(()) }
    fn cuCtxGetCurrent(context: *mut u64) {
        *context = CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or_default());
        Ok(())
    }
    fn cuCtxPushCurrent_v2(context: u64) { CURRENT.with_borrow_mut(|stack| stack.push(context)); Ok(()) }
    fn cuCtxPopCurrent_v2(context: *mut u64) {
        *context = CURRENT.with_borrow_mut(Vec::pop).ok_or(201_u32)?;
        Ok(())
    }
}

functions! { true:
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        *free = TOTAL - used(&state());
        *total = TOTAL;
        Ok(())
    }
    fn cuMemGetAllocationGranularity(size: *mut usize, prop: *const AllocationProp, option: c_uint) {
        need((*prop).kind == 1 && option == 0)?;
        *size = GRANULARITY;
        Ok(())
    }
    fn cuMemAddressReserve(address: *mut u64, size: usize, align: usize, at: u64, flags: c_ulonglong) {
        granules(size)?;
        need(align.is_power_of_two() && at == 0 && flags == 0)?;
        // More than asked for and never given back: enough for a test's few reservations.
        let raw = mmap(std::ptr::null_mut(), size + align, 0, 0x4022, -1, 0) as u64;
        need(raw != u64::MAX)?;
        *address = raw.next_multiple_of(align as u64);
        state().reserved.insert(*address, size);
        Ok(())
    }
    fn cuMemAddressFree(address: u64, size: usize) {
        let mut state = state();
        need(state.reserved.get(&address) == Some(&size))?;
        need(state.mapped.range(address..address + size as u64).next().is_none())?;
        state.reserved.remove(&address);
        munmap(address as *mut c_void, size);
        Ok(())
    }
    fn cuMemCreate(handle: *mut u64, size: usize, prop: *const AllocationProp, flags: c_ulonglong) {
        let prop = &*prop;
        granules(size)?;
        need(prop.kind == 1 && prop.handle_types == 0 && prop.location.kind == 1 && prop.location.id == 0)?;
        need(prop.win32.is_null() && prop.flags == [0; 8] && flags == 0)?;
        let mut state = state();
        if used(&state) + size > TOTAL { return Err(2); }
        let file = memfd_create(c"fake-libcuda".as_ptr(), 1);
        need(file >= 0 && ftruncate(file, size as i64) == 0)?;
        *handle = file as u64;
        state.pages.insert(file as u64, size);
        Ok(())
    }
    fn cuMemRelease(handle: u64) {
        need(state().pages.remove(&handle).is_some())?;
        close(handle as c_int);
        Ok(())
    }
    #[cfg(not(without_map))]
    fn cuMemMap(address: u64, size: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        let mut state = state();
        need(offset == 0 && flags == 0 && state.pages.get(&handle) == Some(&size))?;
        need(address % GRANULARITY as u64 == 0 && !state.mapped.contains_key(&address))?;
        let at = mmap(address as *mut c_void, size, 0, 0x11, handle as c_int, 0);
        need(at as u64 == address)?;
        state.mapped.insert(address, (size, false));
        Ok(())
    }
    fn cuMemUnmap(address: u64, size: usize) {
        let mut state = state();
        for start in whole(&state, address, size)? { state.mapped.remove(&start); }
        mmap(address as *mut c_void, size, 0, 0x4032, -1, 0);
        Ok(())
    }
    fn cuMemSetAccess(address: u64, size: usize, wanted: *const AccessDesc, count: usize) {
        let wanted = &*wanted;
        need(count == 1 && wanted.location.kind == 1 && wanted.location.id == 0)?;
        let mut state = state();
        let starts = whole(&state, address, size)?;
        let access = match wanted.flags { 0 => 0, 3 => 3, _ => return Err(1) };
        need(mprotect(address as *mut c_void, size, access) == 0)?;
        for start in starts { state.mapped.get_mut(&start).unwrap().1 = access != 0; }
        Ok(())
    }
    fn cuStreamCreate(stream: *mut u64, flags: c_uint) {
        need(flags == 1)?;
        let mut state = state();
        state.next += 16;
        *stream = state.next;
        state.streams.insert(*stream);
        Ok(())
    }
    fn cuStreamDestroy_v2(stream: u64) { need(state().streams.remove(&stream)) }
    fn cuStreamSynchronize(handle: u64) { stream(&state(), handle) }
    fn cuStreamIsCapturing(handle: u64, status: *mut c_uint) {
        stream(&state(), handle)?;
        *status = setting("capturing") as c_uint;
        Ok(())
    }
    fn cuStreamWaitEvent(handle: u64, event: u64, flags: c_uint) {
        let state = state();
        stream(&state, handle)?;
        need(state.events.contains(&event) && flags == 0)
    }
    fn cuEventCreate(event: *mut u64, flags: c_uint) {
        need(flags == 2 || flags == 0)?;
        let mut state = state();
        state.next += 16;
        *event = state.next;
        state.events.insert(*event);
        if flags == 0 {
            let made = state.next;
            state.timers.insert(made, None);
        }
        Ok(())
    }
    fn cuEventDestroy_v2(event: u64) {
        let mut state = state();
        state.timers.remove(&event);
        need(state.events.remove(&event))
    }
    fn cuEventRecord(event: u64, handle: u64) {
        let mut state = state();
        stream(&state, handle)?;
        need(state.events.contains(&event))?;
        state.clock += 1;
        let now = state.clock;
        if let Some(time) = state.timers.get_mut(&event) { *time = Some(now); }
        Ok(())
    }
    fn cuEventElapsedTime(milliseconds: *mut f32, start: u64, end: u64) {
        let state = state();
        let time = |event| state.timers.get(&event).copied().flatten().ok_or(400_u32);
        *milliseconds = time(end)? as f32 - time(start)? as f32;
        Ok(())
    }
    fn cuEventQuery(event: u64) { need(state().events.contains(&event)) }
    fn cuEventSynchronize(event: u64) { need(state().events.contains(&event)) }
    fn cuMemHostRegister_v2(address: *mut c_void, size: usize, flags: c_uint) {
        need(!address.is_null() && size > 0 && (flags == 1 || flags == 9))?;
        let mut state = state();
        let (start, end) = (address as u64, address as u64 + size as u64);
        if state.registered.iter().any(|(at, size)| *at < end && at + *size as u64 > start) { return Err(712); }
        state.registered.insert(start, size);
        Ok(())
    }
    fn cuMemHostUnregister(address: *mut c_void) {
        state().registered.remove(&(address as u64)).map(|_| ()).ok_or(713)
    }
    fn cuMemcpyHtoDAsync_v2(target: u64, source: *const c_void, size: usize, handle: u64) {
        let state = state();
        stream(&state, handle)?;
        copy_in(&state, target, source as u64, size)
    }
    fn cuMemcpyDtoHAsync_v2(target: *mut c_void, source: u64, size: usize, handle: u64) {
        let state = state();
        stream(&state, handle)?;
        usable(&state, source, size)?;
        host(&state, target as u64, size)?;
        std::ptr::copy(source as *const u8, target.cast(), size);
        Ok(())
    }
    fn cuMemsetD8Async(address: u64, value: u8, size: usize, handle: u64) {
        let state = state();
        stream(&state, handle)?;
        usable(&state, address, size)?;
        std::ptr::write_bytes(address as *mut u8, value, size);
        Ok(())
    }
    // The options are an error log and its size, in this order.
    fn cuModuleLoadDataEx(module: *mut u64, image: *const c_void, count: c_uint, options: *mut c_uint,
        values: *mut *mut c_void) {
        need(count == 2 && *options == 5 && *options.add(1) == 6)?;
        let image = text(image.cast());
        let refusal = match image.split_whitespace().nth(1) {
            _ if !image.starts_with(".version") => Some((218, c"no PTX")),
            Some(version) if version.parse::<f32>().unwrap() > 8.7 =>
                Some((222, c"Unsupported .version; current version is '8.7'")),
            _ => None,
        };
        if let Some((code, log)) = refusal {
            let log = log.to_bytes_with_nul();
            need(*values.add(1) as usize >= log.len())?;
            std::ptr::copy(log.as_ptr(), (*values).cast(), log.len());
            return Err(code);
        }
        let mut state = state();
        state.next += 16;
        *module = state.next;
        let made = *module;
        need(state.modules.insert(made))
    }
    fn cuModuleUnload(module: u64) { need(state().modules.remove(&module)) }
    fn cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) {
        need(state().modules.contains(&module))?;
        if text(name) != "copy_one" { return Err(500); }
        *function = module + 1;
        Ok(())
    }
    // The one kernel there is copies a u32: copy_one(target, source).
    fn cuLaunchKernel(function: u64, bx: c_uint, by: c_uint, bz: c_uint, tx: c_uint, ty: c_uint, tz: c_uint,
        _shared: c_uint, handle: u64, arguments: *mut *mut c_void, extra: *mut *mut c_void) {
        let state = state();
        need(state.modules.contains(&(function - 1)) && extra.is_null())?;
        need([bx, by, bz, tx, ty, tz].iter().all(|&count| count > 0))?;
        stream(&state, handle)?;
        let (target, source) = (*(*arguments).cast::<u64>(), *(*arguments.add(1)).cast::<u64>());
        usable(&state, target, 4)?;
        usable(&state, source, 4)?;
        std::ptr::copy(source as *const u8, target as *mut u8, 4);
        Ok(())
    }
    #[cfg(not(without_batch))]
    fn cuMemcpyBatchAsync(targets: *mut u64, sources: *mut u64, sizes: *mut usize, count: usize,
        attributes: *mut CopyAttributes, starts: *mut usize, attribute_count: usize, failed: *mut usize,
        handle: u64) {
        let state = state();
        stream(&state, handle)?;
        let about = &*attributes;
        *failed = usize::MAX;
        need(handle > 2 && count > 0 && attribute_count == 1 && *starts == 0)?;
        need(about.source_order == 1 && about.flags == 0)?;
        need(about.source_hint.kind == 0 && about.target_hint.kind == 0)?;
        for index in 0..count {
            let (target, source, size) = (*targets.add(index), *sources.add(index), *sizes.add(index));
            *failed = index;
            need(size > 0)?;
            copy_in(&state, target, source, size)?;
        }
        Ok(())
    }
}
