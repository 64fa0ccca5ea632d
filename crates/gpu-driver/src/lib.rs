//! The driver verbs that weight streaming needs, on CUDA or emulated on the host.
//!
#![doc = include_str!("../README.md")]
//! # Inside
//!
//! `driver`, `types`, `error`: the seam. `module`: kernels, owned. `host`: the emulator. `cuda`: libcuda. `faulty`: failures on purpose.
//! `contract`: what both drivers check. `platform`: what depends on the operating system.
#![expect(unsafe_code, reason = "this crate owns raw device and host memory")]

mod contract;
mod cuda;
mod driver;
mod error;
mod faulty;
mod host;
mod module;
mod platform;
mod types;
mod verb;

pub use cuda::{CudaDeviceProbe, CudaDriver, CudaProbe};
pub use driver::Driver;
pub use error::{DriverError, Result};
pub use faulty::Faulty;
pub use host::{CopyOrder, HostCounters, HostDriver, HostOptions};
pub use module::{Kernel, KernelArgument, LaunchGrid, Module};
pub use types::{
    Access, Bytes, DeviceAddress, DeviceIdentity, DeviceInfo, DeviceKind, DeviceOrdinal, EventHandle,
    HostToDevice, KernelHandle, MemoryInfo, ModuleHandle, PageHandle, Registration, StreamHandle,
};
pub use verb::Verb;
