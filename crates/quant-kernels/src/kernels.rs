//! The kernels of one device: loaded when first used, launched after every bound was checked. The crate's only unsafe code.
#![expect(unsafe_code, reason = "launches kernels on memory that the caller vouches for")]

use std::collections::HashMap;
use std::ffi::CString;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_driver::{Driver, DriverError, Kernel, KernelArgument, LaunchGrid, Module, StreamHandle};
use quant_router::QuantWeight;

use crate::error::Result;
use crate::family::Family;
use crate::launch::{DevicePart, DeviceTarget, Launch, THREADS, TargetKind};
use crate::plan;

/// The kernels of a device.
///
/// A family's module is loaded into the device's context when a weight of it is first met, which compiles it and takes some tenths
/// of a second where the driver has not kept the result; [`prepare`](Self::prepare) does it ahead. A refusal is remembered.
/// Dropping it unloads the modules, which waits for nothing: keep it until everything submitted has run.
#[derive(Debug)]
pub struct Kernels {
    driver: Arc<dyn Driver>,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    modules: HashMap<Family, Result<Arc<Module>, DriverError>>,
    kernels: HashMap<(&'static str, TargetKind), Kernel>,
}

impl Kernels {
    /// The kernels of a driver's device. Loads nothing yet.
    pub fn new(driver: Arc<dyn Driver>) -> Self {
        Self { driver, loaded: Mutex::default() }
    }

    /// The device's driver.
    pub const fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Whether there is a kernel for this weight: all formats that quant-router decodes, in sizes that devices hold.
    pub fn supports(weight: &QuantWeight) -> bool {
        plan::is_supported(weight)
    }

    /// Loads what a weight needs, so that the first [`dequantize`](Self::dequantize) does not.
    ///
    /// # Errors
    /// [`DriverError::NoKernels`] on the emulator; [`DriverError::ModuleRefused`] if the driver cannot take the module.
    pub fn prepare(&self, weight: &QuantWeight, kind: TargetKind) -> Result<()> {
        let (family, kernel) = plan::kernel_of(weight, kind)?;
        self.kernel(family, kernel, kind)?;
        Ok(())
    }

    /// Submits what writes some rows of a weight, as numbers, into memory of exactly their size: the same numbers that
    /// [`quant_router::dequantize`] writes, bit for bit, but for which NaN a NaN is. `SVDQuant` as bf16 or f16 is within one
    /// step, since matrix instructions sum it; see the crate's description.
    ///
    /// Rows are those of the logical matrix: all dimensions but the last. The host waits for nothing.
    ///
    /// # Errors
    /// If rows, parts and target do not fit the description, a part or the target lies where the device cannot read or write its
    /// numbers, or the driver refuses. Then nothing was submitted, except by a driver that refuses a launch after others of the
    /// same weight.
    ///
    /// # Safety
    /// Parts and target are memory of this driver's device with the sizes that are given. Until the work has run, parts are not
    /// written and the target is not used by anybody else; `stream` belongs to the device, and the work before it on that stream
    /// includes whatever made the parts.
    pub unsafe fn dequantize(
        &self,
        weight: &QuantWeight,
        parts: &[DevicePart<'_>],
        rows: Range<u64>,
        target: DeviceTarget,
        stream: StreamHandle,
    ) -> Result<()> {
        let launches = plan::plan(weight, parts, rows, target)?;
        // SAFETY: the launches stay inside the parts and the target, which the caller vouches for.
        unsafe { self.submit(&launches, stream) }
    }

    /// Submits launches that [`plan`](crate::plan) worked out, which may be kept for as long as the memory stays where it is.
    ///
    /// # Errors
    /// As [`dequantize`](Self::dequantize), from the driver.
    ///
    /// # Safety
    /// As [`dequantize`](Self::dequantize), for the memory that they were planned for.
    pub unsafe fn submit(&self, launches: &[Launch], stream: StreamHandle) -> Result<()> {
        for launch in launches {
            let kernel = self.kernel(launch.family, launch.kernel, launch.kind)?;
            let grid =
                LaunchGrid { blocks: [launch.blocks, 1, 1], threads: [THREADS, 1, 1], shared_bytes: 0 };
            // SAFETY: the kernel takes one struct, which is the argument; the caller vouches for the memory.
            unsafe { kernel.launch(grid, &[KernelArgument::Struct(&launch.argument)], stream) }?;
        }
        Ok(())
    }

    fn kernel(&self, family: Family, name: &'static str, kind: TargetKind) -> Result<Kernel> {
        let mut loaded = self.loaded();
        if let Some(kernel) = loaded.kernels.get(&(name, kind)) {
            return Ok(kernel.clone());
        }
        let module = loaded.modules.entry(family).or_insert_with(|| self.load(family)).clone();
        if let (Err(DriverError::ModuleRefused { .. }), Some((before, older))) = (&module, family.before()) {
            drop(loaded);
            return self.kernel(before, older, kind);
        }
        let module = module?;
        let full = terminated(&format!("{name}_{}", kind.name()))?;
        let kernel = module.kernel(&full)?;
        loaded.kernels.insert((name, kind), kernel.clone());
        Ok(kernel)
    }

    fn load(&self, family: Family) -> Result<Arc<Module>, DriverError> {
        let image = terminated(family.ptx())?;
        // SAFETY: the text is PTX that the project's compiler wrote, and terminated.
        unsafe { Module::load(Arc::clone(&self.driver), &image) }
    }

    fn loaded(&self) -> MutexGuard<'_, Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A text as C has it.
fn terminated(text: &str) -> Result<CString, DriverError> {
    CString::new(text).map_err(|error| DriverError::InvalidArgument {
        call: "load_module",
        what: format!("a text with a zero at {}", error.nul_position()),
    })
}
