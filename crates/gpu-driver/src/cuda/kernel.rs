//! The verbs of kernels on CUDA: modules loaded with the compiler's log, and launches.

use std::ffi::{CStr, c_uint, c_void};

use super::CudaDriver;
use super::api::SUCCESS;
use crate::error::{DriverError, Result};
use crate::module::{KernelArgument, LaunchGrid};
use crate::types::{KernelHandle, ModuleHandle, StreamHandle};

/// `CU_JIT_ERROR_LOG_BUFFER` and `CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES`.
const LOG_OPTIONS: [c_uint; 2] = [5, 6];
/// Bytes of a refused module's log that are kept.
const LOG_BYTES: usize = 4096;

impl CudaDriver {
    /// Loads a module.
    ///
    /// # Safety
    /// `image` is terminated PTX or a whole image of machine code.
    pub(super) unsafe fn module(&self, image: &CStr) -> Result<ModuleHandle> {
        let _current = self.context.enter()?;
        let mut module = 0;
        let mut log = vec![0_u8; LOG_BYTES];
        let mut options = LOG_OPTIONS;
        // The second value is a number in the place of a pointer; the driver writes back how much it used.
        let size = std::ptr::without_provenance_mut::<c_void>(LOG_BYTES - 1);
        let mut values = [log.as_mut_ptr().cast::<c_void>(), size];
        let (image, count) = (image.as_ptr().cast::<c_void>(), options.len() as c_uint);
        // SAFETY: the caller vouches for the image; options and values are as many as is said, and the log is as long.
        let code = unsafe {
            (self.api.module_load)(&raw mut module, image, count, options.as_mut_ptr(), values.as_mut_ptr())
        };
        if code == SUCCESS {
            return Ok(ModuleHandle(module));
        }
        let text = CStr::from_bytes_until_nul(&log)
            .map_or_else(|_| String::new(), |log| log.to_string_lossy().into());
        let text = text.trim();
        let log = if text.is_empty() { "it says no more".to_owned() } else { text.to_owned() };
        match self.api.check("cuModuleLoadDataEx", code, String::new) {
            Err(DriverError::Call { code, name, .. }) => Err(DriverError::ModuleRefused { code, name, log }),
            other => other.map(|()| ModuleHandle(module)),
        }
    }

    /// Unloads a module.
    ///
    /// # Safety
    /// It was loaded and not unloaded before.
    pub(super) unsafe fn unload(&self, module: ModuleHandle) -> Result<()> {
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches for the module.
        let code = unsafe { (self.api.module_unload)(module.0) };
        self.api.check("cuModuleUnload", code, String::new)
    }

    /// Finds a kernel.
    ///
    /// # Safety
    /// The module is loaded.
    pub(super) unsafe fn kernel(&self, module: ModuleHandle, name: &CStr) -> Result<KernelHandle> {
        let _current = self.context.enter()?;
        let mut kernel = 0;
        // SAFETY: the caller vouches for the module; the name is terminated, the pointer is valid for the write.
        let code = unsafe { (self.api.module_function)(&raw mut kernel, module.0, name.as_ptr()) };
        self.api.check("cuModuleGetFunction", code, || format!(": {}", name.to_string_lossy()))?;
        Ok(KernelHandle(kernel))
    }

    /// Submits a kernel.
    ///
    /// # Safety
    /// As `Driver::launch`.
    pub(super) unsafe fn submit(
        &self,
        kernel: KernelHandle,
        grid: LaunchGrid,
        arguments: &[KernelArgument<'_>],
        stream: StreamHandle,
    ) -> Result<()> {
        grid.check()?;
        let LaunchGrid { blocks, threads, shared_bytes } = grid;
        let mut bits: Vec<u64> = arguments.iter().map(|argument| argument.bits()).collect();
        let mut pointers: Vec<*mut c_void> = Vec::with_capacity(bits.len());
        for (argument, bits) in arguments.iter().zip(&mut bits) {
            pointers.push(match argument {
                // The driver copies arguments in the call and writes to none.
                KernelArgument::Struct(words) => words.as_ptr().cast_mut().cast::<c_void>(),
                _ => std::ptr::from_mut(bits).cast::<c_void>(),
            });
        }
        let _current = self.context.enter()?;
        // SAFETY: the caller vouches for the kernel and its arguments; each pointer leads to bytes that live through the
        // call, eight or those of a struct.
        let code = unsafe {
            (self.api.launch)(
                kernel.0,
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
        self.api.check("cuLaunchKernel", code, || format!(": {grid:?}"))
    }
}
