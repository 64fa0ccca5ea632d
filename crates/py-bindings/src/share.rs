//! A device that several models share, as Python makes it.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use weightstream::{Bytes, Share as Facade};

use crate::device::Device;
use crate::error::{Class, Failure, guarded};
use crate::process::OfProcess;

/// A page pool and a transit ring for the models of one device.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Share {
    inner: Arc<Mutex<OfProcess<Facade>>>,
}

impl Share {
    pub(crate) fn share(&self) -> Result<Facade, Failure> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.get().cloned().ok_or_else(|| Failure::new(Class::Internal, "a share without its pages"))
    }
}

#[pymethods]
impl Share {
    /// For models of which the largest has `largest` bytes, and that together take at most `limit`.
    #[new]
    fn new(device: &Device, largest: u64, limit: u64) -> PyResult<Self> {
        let share = guarded(|| {
            let granule = Facade::granule_for(Bytes(largest), device.info().granularity);
            Ok(Facade::new(device.driver()?, granule, Bytes(limit))?)
        })?;
        Ok(Self { inner: Arc::new(Mutex::new(OfProcess::new(share))) })
    }

    fn report(&self) -> PyResult<String> {
        let report = self.share()?.report();
        serde_json::to_string(&report)
            .map_err(|error| Failure::new(Class::Internal, error.to_string()).into())
    }
}
