//! The CUDA driver: found at run time, checked once, called through plain numbers.
//!
//! ```text
//!   open ── library? ── every function? ── version ≥ 12.0? ── cuInit ── device? ── virtual memory?
//!                │            │                 │               │          │            │
//!         LibraryMissing SymbolMissing     DriverTooOld        Call   NoSuchDevice  Unsupported
//!                                     … ── primary context retained ── granularity ── CudaDriver
//! ```
//!
//! Nothing here panics, and nothing is called before the whole of it is known to be there. The context is the
//! device's primary one, as PyTorch uses it; each call makes it current and leaves the thread as it found it.

mod api;
mod context;
mod copies;
mod kernel;
mod probe;
mod verbs;

pub use probe::{CudaDeviceProbe, CudaProbe};

use std::ffi::c_uint;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUmemAllocationGranularity_flags_enum as Granularity, CUmemAllocationHandleType_enum as HandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1 as AllocationFlags,
    CUmemAllocationType_enum as AllocationType, CUmemLocation, CUmemLocationType_enum as LocationType,
};

use crate::error::Result;
use crate::platform;
use crate::types::{Bytes, DeviceIdentity, DeviceInfo, DeviceKind, DeviceOrdinal};
use api::Api;
use context::Context;
use copies::Copies;

/// An NVIDIA GPU through libcuda.
///
/// Streams of others (PyTorch's current one) are passed as `StreamHandle(cu_stream as u64)`. Dropping the driver
/// releases its hold on the primary context and nothing else.
#[derive(Debug)]
pub struct CudaDriver {
    api: Arc<Api>,
    context: Context,
    info: DeviceInfo,
    location: CUmemLocation,
    copies: Copies,
}

impl CudaDriver {
    /// Opens a device, or says what is missing. Retains the device's primary context, and makes it if nobody has.
    pub fn open(ordinal: DeviceOrdinal) -> Result<Self> {
        Self::start(Api::load()?, ordinal)
    }

    /// Opens a device of another library that speaks the driver's interface, such as an interposer.
    ///
    /// # Safety
    /// The library at `path` is sound to load, and its functions keep the contracts of the CUDA driver's.
    pub unsafe fn open_library(path: &Path, ordinal: DeviceOrdinal) -> Result<Self> {
        // SAFETY: the caller vouches for the library.
        let api = unsafe { Api::load_from(path) };
        Self::start(api?, ordinal)
    }

    /// Says what CUDA there is, touching no device.
    pub fn probe() -> CudaProbe {
        CudaProbe::of(Api::load())
    }

    /// [`probe`](Self::probe) of another library.
    ///
    /// # Safety
    /// As [`open_library`](Self::open_library).
    pub unsafe fn probe_library(path: &Path) -> CudaProbe {
        // SAFETY: the caller vouches for the library.
        CudaProbe::of(unsafe { Api::load_from(path) })
    }

    fn start(api: Api, ordinal: DeviceOrdinal) -> Result<Self> {
        let api = Arc::new(api);
        let version = probe::driver_version(&api)?;
        let count = probe::start(&api, version, ordinal.0)?;
        let device = probe::device(&api, ordinal.0, count)?;
        let found = probe::probe_device(&api, device)?;
        if let Some(refusal) = found.refusal {
            return Err(refusal);
        }
        let location = CUmemLocation { type_: LocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device };
        let context = Context::retain(Arc::clone(&api), device)?;
        let granularity = granularity(&api, &context, location)?;
        let info = DeviceInfo {
            kind: DeviceKind::Cuda,
            identity: DeviceIdentity { kind: DeviceKind::Cuda, number: context.handle() },
            ordinal,
            name: found.name,
            total_memory: found.total_memory,
            granularity,
            driver_version: version,
            kernel_driver: platform::kernel_driver(),
            read_only_registration: found.read_only_registration,
            batch_copies: api.memcpy_batch.is_some(),
        };
        Ok(Self { api, context, info, location, copies: Copies::default() })
    }
}

/// Pages of a device, without handles for other processes.
const fn pages_at(location: CUmemLocation) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: AllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: HandleType(0),
        location,
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: AllocationFlags {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn granularity(api: &Api, context: &Context, location: CUmemLocation) -> Result<Bytes> {
    let _current = context.enter()?;
    let pages = pages_at(location);
    let mut size = 0_usize;
    let kind = Granularity::CU_MEM_ALLOC_GRANULARITY_MINIMUM as c_uint;
    // SAFETY: both pointers are valid for the call.
    let code = unsafe { (api.granularity)(&raw mut size, &raw const pages, kind) };
    api.check("cuMemGetAllocationGranularity", code, String::new)?;
    Ok(Bytes(size as u64))
}
