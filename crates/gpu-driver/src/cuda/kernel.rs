//! Kernels: loaded from PTX or machine code, launched on any stream. CUDA only; the emulator computes on the host.

use std::ffi::{CStr, c_void};
use std::sync::Arc;

use super::CudaDriver;
use super::api::{Api, DEINITIALIZED, SUCCESS};
use super::context::Context;
use crate::error::{DriverError, Result};
use crate::types::{DeviceAddress, StreamHandle};

/// A kernel of a loaded module. Dropping it unloads the module, which waits for nothing: keep it until what was launched
/// has run.
#[derive(Debug)]
pub struct CudaKernel {
    api: Arc<Api>,
    context: Arc<Context>,
    module: u64,
    function: u64,
    name: String,
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
}

/// A value handed to a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KernelArgument {
    /// A pointer.
    Address(DeviceAddress),
    /// A `u32` or `i32`.
    U32(u32),
    /// A `u64` or `i64`.
    U64(u64),
    /// A `float`.
    F32(f32),
}

impl KernelArgument {
    /// The argument's bytes as a kernel reads them: the low ones of eight.
    fn bits(self) -> u64 {
        match self {
            Self::Address(address) => address.0,
            Self::U32(value) => u64::from(value),
            Self::U64(value) => value,
            Self::F32(value) => u64::from(value.to_bits()),
        }
    }
}

impl CudaDriver {
    /// Loads the kernel `name` of a module: PTX text, which the driver compiles, or machine code.
    ///
    /// # Errors
    /// If the driver refuses the module (a PTX version that is newer than it, a target that is not this device's) or
    /// knows no such kernel in it.
    ///
    /// # Safety
    /// `module` is terminated PTX or a whole image of machine code.
    pub unsafe fn load_kernel(&self, module: &CStr, name: &CStr) -> Result<CudaKernel> {
        let _current = self.context.enter()?;
        let mut loaded = 0;
        // SAFETY: the caller vouches for the image; the pointer is valid for the write.
        let code = unsafe { (self.api.module_load)(&raw mut loaded, module.as_ptr().cast::<c_void>()) };
        self.api.check("cuModuleLoadData", code, || format!(": a module with {}", name.to_string_lossy()))?;
        // Unloads the module if the kernel is not in it.
        let mut kernel = CudaKernel {
            api: Arc::clone(&self.api),
            context: Arc::clone(&self.context),
            module: loaded,
            function: 0,
            name: name.to_string_lossy().into_owned(),
        };
        // SAFETY: the module is alive, the name is terminated, the pointer is valid for the write.
        let code = unsafe { (self.api.module_function)(&raw mut kernel.function, loaded, name.as_ptr()) };
        self.api.check("cuModuleGetFunction", code, || format!(": {}", kernel.name))?;
        Ok(kernel)
    }
}

impl CudaKernel {
    /// Submits the kernel to `stream`.
    ///
    /// # Errors
    /// If there are no threads, or the driver refuses the launch.
    ///
    /// # Safety
    /// The arguments are those of the kernel, in number, order and size; the memory they point to is mapped, and is not
    /// written by others, until the kernel has run; `stream` belongs to this device.
    pub unsafe fn launch(
        &self,
        grid: LaunchGrid,
        arguments: &[KernelArgument],
        stream: StreamHandle,
    ) -> Result<()> {
        let LaunchGrid { blocks, threads, shared_bytes } = grid;
        if blocks.contains(&0) || threads.contains(&0) {
            return Err(DriverError::InvalidArgument {
                call: "launch",
                what: format!("no threads: {grid:?}"),
            });
        }
        let mut bits: Vec<u64> = arguments.iter().map(|argument| argument.bits()).collect();
        let mut pointers: Vec<*mut c_void> =
            bits.iter_mut().map(|bits| std::ptr::from_mut(bits).cast::<c_void>()).collect();
        let _current = self.context.enter()?;
        // SAFETY: the function's module is alive; each pointer leads to eight bytes that live through the call, of which
        // the kernel takes the low ones; the caller vouches for the rest.
        let code = unsafe {
            (self.api.launch)(
                self.function,
                blocks[0],
                blocks[1],
                blocks[2],
                threads[0],
                threads[1],
                threads[2],
                shared_bytes,
                stream.0,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.api.check("cuLaunchKernel", code, || format!(": {} with {grid:?}", self.name))
    }
}

impl Drop for CudaKernel {
    fn drop(&mut self) {
        let unloaded = self.context.enter().map(|_current| {
            // SAFETY: loaded once, by `load_kernel`.
            unsafe { (self.api.module_unload)(self.module) }
        });
        match unloaded {
            Ok(SUCCESS | DEINITIALIZED) => {}
            failed => tracing::error!(?failed, kernel = self.name, "a module was not unloaded"),
        }
    }
}
