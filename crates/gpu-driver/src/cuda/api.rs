//! The CUDA driver library: found, every function we need looked up, and its answers turned into errors.
//!
//! All functions return plain numbers here. The bindings' result enum knows the codes of its own version only, and
//! a newer driver's code in it would be undefined behaviour.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::path::Path;

use cudarc::driver::sys::{CUmemAccessDesc, CUmemAllocationProp, CUmemcpyAttributes};
use libloading::Library;

use crate::error::{DriverError, Result};
use crate::platform;

/// `CUresult` as a number.
pub(super) type Code = u32;
/// `CUDA_SUCCESS`.
pub(super) const SUCCESS: Code = 0;
/// `CUDA_ERROR_INVALID_VALUE`.
pub(super) const INVALID_VALUE: Code = 1;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
pub(super) const OUT_OF_MEMORY: Code = 2;
/// `CUDA_ERROR_DEINITIALIZED`: the process is ending.
pub(super) const DEINITIALIZED: Code = 4;
/// `CUDA_ERROR_NO_DEVICE`.
pub(super) const NO_DEVICE: Code = 100;
/// `CUDA_ERROR_NOT_READY`.
pub(super) const NOT_READY: Code = 600;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub(super) const NOT_SUPPORTED: Code = 801;

/// `cuMemcpyBatchAsync` of 12.8; later signatures have other names, so this one stays what it is.
pub(super) type MemcpyBatch = unsafe extern "C" fn(
    *mut u64,
    *mut u64,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    u64,
) -> Code;

macro_rules! functions {
    ($($name:ident = $symbol:literal ($($argument:ty),*);)*) => {
        /// The driver's functions. Handles (contexts, streams, events, devices, pages) are numbers.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> Code,)*
            /// Absent before driver 12.8.
            pub(super) memcpy_batch: Option<MemcpyBatch>,
        }

        impl Api {
            fn resolve(library: &Library) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is that of the function of this name in the CUDA driver, with integers
                        // in the place of pointers to opaque things and of enums.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> Code>($symbol)
                        };
                        *found.map_err(|_| DriverError::SymbolMissing { symbol: $symbol })?
                    },)*
                    memcpy_batch: {
                        // SAFETY: as above, for the signature of 12.8, which this name keeps.
                        let found = unsafe { library.get::<MemcpyBatch>("cuMemcpyBatchAsync") };
                        found.ok().map(|function| *function)
                    },
                })
            }
        }
    };
}

functions! {
    init = "cuInit" (c_uint);
    driver_version = "cuDriverGetVersion" (*mut c_int);
    error_name = "cuGetErrorName" (Code, *mut *const c_char);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_memory = "cuDeviceTotalMem_v2" (*mut usize, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_uint, c_int);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut u64, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    context_current = "cuCtxGetCurrent" (*mut u64);
    context_push = "cuCtxPushCurrent_v2" (u64);
    context_pop = "cuCtxPopCurrent_v2" (*mut u64);
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    granularity = "cuMemGetAllocationGranularity" (*mut usize, *const CUmemAllocationProp, c_uint);
    address_reserve = "cuMemAddressReserve" (*mut u64, usize, usize, u64, c_ulonglong);
    address_free = "cuMemAddressFree" (u64, usize);
    pages_create = "cuMemCreate" (*mut u64, usize, *const CUmemAllocationProp, c_ulonglong);
    pages_release = "cuMemRelease" (u64);
    map = "cuMemMap" (u64, usize, usize, u64, c_ulonglong);
    unmap = "cuMemUnmap" (u64, usize);
    set_access = "cuMemSetAccess" (u64, usize, *const CUmemAccessDesc, usize);
    stream_create = "cuStreamCreate" (*mut u64, c_uint);
    stream_destroy = "cuStreamDestroy_v2" (u64);
    stream_synchronize = "cuStreamSynchronize" (u64);
    stream_is_capturing = "cuStreamIsCapturing" (u64, *mut c_uint);
    stream_wait = "cuStreamWaitEvent" (u64, u64, c_uint);
    event_create = "cuEventCreate" (*mut u64, c_uint);
    event_destroy = "cuEventDestroy_v2" (u64);
    event_record = "cuEventRecord" (u64, u64);
    event_elapsed = "cuEventElapsedTime" (*mut f32, u64, u64);
    event_query = "cuEventQuery" (u64);
    event_synchronize = "cuEventSynchronize" (u64);
    register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    unregister = "cuMemHostUnregister" (*mut c_void);
    copy_to_device = "cuMemcpyHtoDAsync_v2" (u64, *const c_void, usize, u64);
    copy_to_host = "cuMemcpyDtoHAsync_v2" (*mut c_void, u64, usize, u64);
    fill = "cuMemsetD8Async" (u64, u8, usize, u64);
    module_load = "cuModuleLoadDataEx" (*mut u64, *const c_void, c_uint, *mut c_uint, *mut *mut c_void);
    module_unload = "cuModuleUnload" (u64);
    module_function = "cuModuleGetFunction" (*mut u64, u64, *const c_char);
    launch = "cuLaunchKernel" (
        u64, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, u64, *mut *mut c_void, *mut *mut c_void
    );
}

impl Api {
    /// The installed driver's functions.
    pub(super) fn load() -> Result<Self> {
        for name in platform::CUDA_LIBRARIES {
            // SAFETY: the NVIDIA driver library, which PyTorch loads by the same name; its initialisers are sound.
            match unsafe { Library::new(*name) } {
                Ok(library) => return Self::keep(library),
                Err(error) => tracing::debug!(%error, name, "the CUDA driver library was not loaded"),
            }
        }
        Err(DriverError::LibraryMissing)
    }

    /// The functions of another library that speaks the driver's interface.
    ///
    /// # Safety
    /// The library at `path` is sound to load, and its functions keep the contracts of the CUDA driver's.
    pub(super) unsafe fn load_from(path: &Path) -> Result<Self> {
        // SAFETY: the caller vouches for the library.
        let loaded = unsafe { Library::new(path) };
        let library = loaded.map_err(|error| {
            tracing::debug!(%error, path = %path.display(), "the library was not loaded");
            DriverError::LibraryMissing
        })?;
        Self::keep(library)
    }

    fn keep(library: Library) -> Result<Self> {
        let api = Self::resolve(&library);
        // The driver is never unloaded: its own threads run in it, and the functions are held by value.
        std::mem::forget(library);
        api
    }

    /// Success, or the error of a code, with what `detail` says about the call.
    pub(super) fn check(
        &self,
        call: &'static str,
        code: Code,
        detail: impl FnOnce() -> String,
    ) -> Result<()> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(DriverError::Call { call, code, name: self.name_of(code), detail: detail() })
    }

    /// The driver's name of a code.
    fn name_of(&self, code: Code) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the pointer is valid for the write; an unknown code is answered with an error.
        let answer = unsafe { (self.error_name)(code, &raw mut name) };
        if answer != SUCCESS || name.is_null() {
            return "unknown".into();
        }
        // SAFETY: the driver gives a static, terminated text.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("memcpy_batch", &self.memcpy_batch.is_some()).finish_non_exhaustive()
    }
}
