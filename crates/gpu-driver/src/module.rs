//! Modules of kernels, owned: loaded once, unloaded when the last of their kernels is dropped.
//!
//! ```text
//!   Module ── unloaded when dropped          drop order: kernels, then their module, then the driver
//!     └─ Kernel ── keeps its module          each holds what it needs, so that any order of dropping is this one
//! ```

use std::ffi::CStr;
use std::sync::Arc;

use crate::driver::Driver;
use crate::error::{DriverError, Result};
use crate::types::{DeviceAddress, KernelHandle, ModuleHandle, StreamHandle};

/// A loaded module. Dropping it, and the kernels of it, unloads it, which waits for nothing: keep it until what was
/// launched has run.
#[derive(Debug)]
pub struct Module {
    driver: Arc<dyn Driver>,
    handle: ModuleHandle,
}

impl Module {
    /// Loads a module into the device's context: PTX text, which the driver compiles, or machine code.
    ///
    /// # Errors
    /// [`DriverError::NoKernels`] where the device runs none; [`DriverError::ModuleRefused`], with what the driver's compiler
    /// says, for PTX that is newer than the driver or made for another device.
    ///
    /// # Safety
    /// `image` is terminated PTX or a whole image of machine code.
    pub unsafe fn load(driver: Arc<dyn Driver>, image: &CStr) -> Result<Arc<Self>> {
        // SAFETY: the caller vouches for the image.
        let handle = unsafe { driver.load_module(image) }?;
        Ok(Arc::new(Self { driver, handle }))
    }

    /// Finds a kernel by its name.
    pub fn kernel(self: &Arc<Self>, name: &CStr) -> Result<Kernel> {
        // SAFETY: the module is loaded as long as `self` lives.
        let handle = unsafe { self.driver.find_kernel(self.handle, name) }?;
        Ok(Kernel { module: Arc::clone(self), handle })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once, by `load`; whoever drops it has waited for what was launched.
        if let Err(error) = unsafe { self.driver.unload_module(self.handle) } {
            tracing::error!(%error, "a module was not unloaded");
        }
    }
}

/// A kernel of a module, which it keeps loaded.
#[derive(Debug, Clone)]
pub struct Kernel {
    module: Arc<Module>,
    handle: KernelHandle,
}

impl Kernel {
    /// Submits the kernel to `stream`, which may be somebody else's.
    ///
    /// # Errors
    /// If there are no threads, or the driver refuses the launch.
    ///
    /// # Safety
    /// As [`Driver::launch`].
    pub unsafe fn launch(
        &self,
        grid: LaunchGrid,
        arguments: &[KernelArgument<'_>],
        stream: StreamHandle,
    ) -> Result<()> {
        // SAFETY: the module is loaded as long as `self` lives; the caller vouches for the rest.
        unsafe { self.module.driver.launch(self.handle, grid, arguments, stream) }
    }
}

/// How many threads run a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchGrid {
    /// Thread blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Threads a block in x, y and z.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory a block.
    pub shared_bytes: u32,
}

impl LaunchGrid {
    /// One dimension, with at least `count` threads in blocks of `threads`.
    pub const fn linear(count: u32, threads: u32) -> Self {
        Self { blocks: [count.div_ceil(threads), 1, 1], threads: [threads, 1, 1], shared_bytes: 0 }
    }

    /// Refuses a grid without threads.
    pub(crate) fn check(self) -> Result<()> {
        if self.blocks.contains(&0) || self.threads.contains(&0) {
            return Err(DriverError::InvalidArgument {
                call: "launch",
                what: format!("no threads: {self:?}"),
            });
        }
        Ok(())
    }
}

/// A value handed to a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KernelArgument<'a> {
    /// A pointer.
    Address(DeviceAddress),
    /// A `u32` or `i32`.
    U32(u32),
    /// A `u64` or `i64`.
    U64(u64),
    /// A `float`.
    F32(f32),
    /// A struct by value, in pieces of eight bytes.
    Struct(&'a [u64]),
}

impl KernelArgument<'_> {
    /// The eight bytes of one that has no more, of which a kernel takes the low ones.
    pub(crate) fn bits(self) -> u64 {
        match self {
            Self::Address(address) => address.0,
            Self::U32(value) => u64::from(value),
            Self::U64(value) => value,
            Self::F32(value) => u64::from(value.to_bits()),
            Self::Struct(words) => words.first().copied().unwrap_or_default(),
        }
    }
}
