//! The kernels of a GPU, for tensors that PyTorch has there: what a weight's numbers are written with, on the stream of whoever asks.
//! This file launches them, which is unsafe: Python vouches for its tensors' addresses.
#![expect(unsafe_code, reason = "launches kernels on the memory of tensors")]

use std::collections::HashMap;
use std::sync::Arc;

use gpu_driver::{Bytes, CudaDriver, DeviceAddress, DeviceOrdinal, StreamHandle};
use pyo3::prelude::*;
use quant_kernels::{DevicePart, DeviceTarget, Kernels, TargetKind};

use crate::error::{Class, Failure, guarded};
use crate::process::OfProcess;
use crate::quant::QuantWeight;

/// Kernels of one CUDA device, loaded as they are needed.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct DeviceKernels {
    kernels: OfProcess<Kernels>,
}

/// A type of numbers by its name in files.
fn kind_of(dtype: &str) -> Result<TargetKind, Failure> {
    match dtype {
        "F32" => Ok(TargetKind::F32),
        "BF16" => Ok(TargetKind::Bf16),
        "F16" => Ok(TargetKind::F16),
        other => Err(Failure::new(Class::NotAvailable, format!("no kernel writes numbers as {other}"))),
    }
}

impl DeviceKernels {
    fn kernels(&self) -> Result<&Kernels, Failure> {
        self.kernels.get().ok_or_else(|| Failure::new(Class::Internal, "a device without its kernels"))
    }
}

#[pymethods]
impl DeviceKernels {
    #[new]
    fn new(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        let driver = py.detach(|| guarded(|| Ok(CudaDriver::open(DeviceOrdinal(ordinal))?)))?;
        Ok(Self { kernels: OfProcess::new(Kernels::new(Arc::new(driver))) })
    }

    #[staticmethod]
    fn supports(weight: &QuantWeight) -> bool {
        Kernels::supports(&weight.inner)
    }

    fn prepare(&self, py: Python<'_>, weight: &QuantWeight, dtype: &str) -> PyResult<()> {
        py.detach(|| guarded(|| Ok(self.kernels()?.prepare(&weight.inner, kind_of(dtype)?)?)))?;
        Ok(())
    }

    /// The interpreter is kept: a launch takes some microseconds, less than what giving it up may cost.
    #[expect(clippy::needless_pass_by_value, reason = "PyO3 converts dictionaries into owned values")]
    fn dequantize(
        &self,
        weight: &QuantWeight,
        parts: HashMap<String, (u64, u64)>,
        rows: (u64, u64),
        out: u64,
        dtype: &str,
        stream: u64,
    ) -> PyResult<()> {
        let submit = || {
            let kind = kind_of(dtype)?;
            let given: Vec<_> = parts
                .iter()
                .map(|(tensor, (address, size))| DevicePart {
                    tensor,
                    address: DeviceAddress(*address),
                    size: Bytes(*size),
                })
                .collect();
            let numbers = rows.1.saturating_sub(rows.0).saturating_mul(weight.inner.columns());
            let size = Bytes(numbers.saturating_mul(kind.bytes()));
            let target = DeviceTarget { address: DeviceAddress(out), size, kind };
            let kernels = self.kernels()?;
            // SAFETY: Python gives the memory of live tensors of this device, of which `out` has room for the rows, and a stream on
            // which whatever made them was submitted before; PyTorch's allocator keeps their memory for that stream's order.
            unsafe {
                kernels.dequantize(&weight.inner, &given, rows.0..rows.1, target, StreamHandle(stream))
            }?;
            Ok(())
        };
        Ok(guarded(submit)?)
    }
}
