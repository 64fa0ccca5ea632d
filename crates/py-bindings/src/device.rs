//! Opening devices, and reading sizes and budgets as Python gives them.

use std::sync::{Arc, Mutex, PoisonError};

use gpu_driver::{
    Bytes, CopyOrder, CudaDriver, DeviceInfo, DeviceKind, DeviceOrdinal, Driver, HostDriver, HostOptions,
};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};
use weightstream::{Budget, Page, PagePool};

use crate::error::{Class, Failure, guarded};
use crate::process::OfProcess;

/// A device's driver, opened.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Device {
    driver: OfProcess<Arc<dyn Driver>>,
    info: DeviceInfo,
    occupied: Arc<Mutex<Occupancy>>,
}

/// What of a device's memory is taken beside weights, now and at most.
#[derive(Debug, Default, Clone, Copy)]
struct Occupancy {
    now: u64,
    peak: u64,
}

/// Device memory that something else than weights takes, until it is released or dropped: for the emulator, on which PyTorch
/// allocates nothing.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Occupied {
    taken: Mutex<Option<Taken>>,
}

/// A page, counted while it is there.
#[derive(Debug)]
struct Taken {
    page: Arc<Page>,
    occupied: Arc<Mutex<Occupancy>>,
}

impl Drop for Taken {
    fn drop(&mut self) {
        let mut occupied = self.occupied.lock().unwrap_or_else(PoisonError::into_inner);
        occupied.now = occupied.now.saturating_sub(self.page.size().0);
    }
}

#[pymethods]
impl Occupied {
    fn release(&self) {
        drop(self.taken.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Device {
    fn new(driver: Arc<dyn Driver>) -> Self {
        let info = driver.device_info().clone();
        Self { driver: OfProcess::new(driver), info, occupied: Arc::default() }
    }

    /// The driver, to be shared with a model.
    pub(crate) fn driver(&self) -> Result<Arc<dyn Driver>, Failure> {
        self.driver.get().cloned().ok_or_else(|| Failure::new(Class::Internal, "a device without its driver"))
    }

    /// What the device is.
    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.info
    }
}

#[pymethods]
impl Device {
    /// Takes device memory, as activations would; `DeviceError` if there is not so much.
    fn occupy(&self, bytes: u64) -> PyResult<Occupied> {
        let page = guarded(|| {
            let size = Bytes(bytes).checked_round_up(self.info.granularity).unwrap_or(Bytes(bytes));
            let pool = PagePool::new(self.driver()?, size, size).map_err(weightstream::Error::from)?;
            let mut pages = pool.take(1).map_err(weightstream::Error::from)?;
            pages.pop().ok_or_else(|| Failure::new(Class::Internal, "a pool that gave no page"))
        })?;
        let mut occupied = self.occupied.lock().unwrap_or_else(PoisonError::into_inner);
        occupied.now += page.size().0;
        occupied.peak = occupied.peak.max(occupied.now);
        let taken = Taken { page, occupied: Arc::clone(&self.occupied) };
        Ok(Occupied { taken: Mutex::new(Some(taken)) })
    }

    /// What is taken so now, and the most since this was asked for last.
    fn occupied(&self) -> (u64, u64) {
        let mut occupied = self.occupied.lock().unwrap_or_else(PoisonError::into_inner);
        let peak = std::mem::replace(&mut occupied.peak, 0).max(occupied.now);
        (occupied.now, peak)
    }

    #[staticmethod]
    fn cuda(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        let driver = py.detach(|| guarded(|| Ok(CudaDriver::open(DeviceOrdinal(ordinal))?)))?;
        Ok(Self::new(Arc::new(driver)))
    }

    #[staticmethod]
    fn host(bytes: u64, granularity: u64, bandwidth: Option<u64>, order: &str, seed: u64) -> PyResult<Self> {
        let order = match order {
            "eager" => CopyOrder::Eager,
            "lazy" => CopyOrder::Lazy,
            "random" => CopyOrder::Random,
            other => {
                let text = format!("the copy order {other:?} is none of eager, lazy, random");
                return Err(Failure::new(Class::Device, text).into());
            }
        };
        let options = HostOptions::new(Bytes(bytes))
            .granularity(Bytes(granularity))
            .bandwidth(bandwidth)
            .order(order)
            .seed(seed);
        Ok(guarded(|| Ok(Self::new(Arc::new(HostDriver::new(options)?))))?)
    }

    #[getter]
    fn kind(&self) -> &'static str {
        match self.info.kind {
            DeviceKind::Cuda => "cuda",
            DeviceKind::Host => "host",
        }
    }

    #[getter]
    fn ordinal(&self) -> u32 {
        self.info.ordinal.0
    }

    #[getter]
    fn name(&self) -> &str {
        &self.info.name
    }

    #[getter]
    fn total_memory(&self) -> u64 {
        self.info.total_memory.0
    }

    #[getter]
    fn granularity(&self) -> u64 {
        self.info.granularity.0
    }

    fn free_memory(&self) -> PyResult<u64> {
        Ok(guarded(|| Ok(self.driver()?.memory_info()?.free.0))?)
    }
}

/// Bytes in a number or a text like "512MiB".
#[pyfunction]
pub(crate) fn parse_bytes(size: &Bound<'_, PyAny>) -> PyResult<u64> {
    match budget(size)? {
        Budget::Bytes(bytes) => Ok(bytes.0),
        _ => Err(Failure::new(Class::Budget, format!("the size {size} is not a number of bytes")).into()),
    }
}

/// A budget as Python gives it: None, a number of bytes, or a text.
pub(crate) fn budget(given: &Bound<'_, PyAny>) -> PyResult<Budget> {
    if given.is_none() {
        return Ok(Budget::Open);
    }
    if let Ok(text) = given.cast::<PyString>() {
        return text.to_str()?.parse().map_err(|error: weightstream::Error| Failure::from(error).into());
    }
    let refuse = |reason: &str| {
        let shown = given.repr().map_or_else(|_| "?".into(), |text| text.to_string());
        PyErr::from(Failure::new(Class::Budget, format!("the budget {shown} cannot be used: {reason}")))
    };
    if given.is_instance_of::<PyBool>() || !given.hasattr("__index__")? {
        return Err(refuse("give bytes, \"512MiB\", \"2.2GB\" or \"30%\""));
    }
    let number: i128 =
        given.call_method0("__index__")?.extract().map_err(|_| refuse("it is out of range"))?;
    match u64::try_from(number) {
        Ok(bytes) if bytes > 0 => Ok(Budget::Bytes(Bytes(bytes))),
        Ok(_) => Err(refuse("it must be more than nothing")),
        Err(_) if number < 0 => Err(refuse("it must be more than nothing")),
        Err(_) => Err(refuse("no device has so much")),
    }
}
