//! The functions that PyTorch's memory pools call, by their names in this library: allocations for which weights make room.
//!
//! They are called on any thread, with the interpreter's lock or without, and never take it.
#![expect(unsafe_code, reason = "functions found by name are called as C")]

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::prelude::*;
use weightstream::{Allocations as Facade, Bytes, DeviceAddress, DeviceKind, StreamHandle};

use crate::device::Device;
use crate::offloader::{Inner, Offloader};

/// Emulated devices have numbers from here on: PyTorch knows none of them.
const FIRST_EMULATED: i32 = 1 << 20;

/// The pools there are.
static SERVED: Mutex<Vec<Served>> = Mutex::new(Vec::new());

/// A device's allocations, and whose weights make room for them.
#[derive(Debug, Clone)]
struct Served {
    number: i32,
    process: u32,
    allocations: Arc<Facade>,
    models: Vec<Weak<Inner>>,
}

/// Allocations of one device, for as long as the process lives.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Allocations {
    number: i32,
}

#[pymethods]
impl Allocations {
    /// Those of a device: of a CUDA device always the same.
    #[new]
    fn new(device: &Device) -> PyResult<Self> {
        let mut served = served();
        let number = match device.info().kind {
            DeviceKind::Cuda => i32::try_from(device.info().ordinal.0).unwrap_or(i32::MAX),
            DeviceKind::Host => {
                FIRST_EMULATED.saturating_add(i32::try_from(served.len()).unwrap_or(i32::MAX))
            }
        };
        let process = std::process::id();
        if !served.iter().any(|one| one.number == number && one.process == process) {
            let allocations = Arc::new(Facade::new(device.driver()?));
            served.push(Served { number, process, allocations, models: Vec::new() });
        }
        Ok(Self { number })
    }

    /// The number by which the functions know the device.
    #[getter]
    fn number(&self) -> i32 {
        self.number
    }

    /// A model's preloaded weights make room from now on, until it is closed.
    fn serve(&self, model: &Offloader) {
        if let Some(one) = served().iter_mut().find(|one| one.is_of(self.number)) {
            one.models.retain(|model| model.strong_count() > 0);
            one.models.push(Arc::downgrade(&model.inner));
        }
    }

    /// Bytes allocated now, and the most that ever were.
    fn report(&self) -> (u64, u64) {
        let one = find(self.number);
        one.map_or((0, 0), |one| {
            let (now, peak) = one.allocations.report();
            (now.0, peak.0)
        })
    }
}

impl Served {
    fn is_of(&self, number: i32) -> bool {
        self.number == number && self.process == std::process::id()
    }

    /// Has models give back what they may.
    fn relieve(&self, wanted: Bytes) -> Bytes {
        let mut freed = Bytes::ZERO;
        for model in self.models.iter().filter_map(Weak::upgrade) {
            if freed >= wanted {
                break;
            }
            match model.release_preload(wanted - freed) {
                Ok(given) => freed = freed + given,
                // One that another thread runs, or whose units in use need it all, has nothing to give.
                Err(error) => tracing::debug!(%error, "weights stay where an allocation needs room"),
            }
        }
        freed
    }
}

fn served() -> MutexGuard<'static, Vec<Served>> {
    SERVED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn find(number: i32) -> Option<Served> {
    served().iter().find(|one| one.is_of(number)).cloned()
}

/// Memory of `size` bytes on a device that is served; null if there is none even without what was preloaded.
///
/// Nothing is asked of the caller: what it passes are numbers.
// SAFETY: no other function of this name is linked into a process: it bears the library's.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn weightstream_allocate(
    size: isize,
    device: i32,
    _stream: *mut c_void,
) -> *mut c_void {
    let allocate = || {
        let one = find(device)?;
        let size = Bytes(u64::try_from(size).ok()?);
        match one.allocations.allocate(size, |wanted| one.relieve(wanted)) {
            Ok(address) => Some(address),
            Err(error) => {
                tracing::debug!(%error, "an allocation failed");
                None
            }
        }
    };
    let address = catch_unwind(AssertUnwindSafe(allocate)).ok().flatten();
    address.map_or(std::ptr::null_mut(), |address| std::ptr::without_provenance_mut(address.0 as usize))
}

/// Gives back what [`weightstream_allocate`] gave, once what `stream` holds has run.
// SAFETY: as above.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn weightstream_free(
    address: *mut c_void,
    _size: isize,
    device: i32,
    stream: *mut c_void,
) {
    let free = || {
        let Some(one) = find(device) else { return };
        let (address, stream) = (DeviceAddress(address.addr() as u64), StreamHandle(stream.addr() as u64));
        if let Err(error) = one.allocations.free(address, stream) {
            tracing::error!(%error, ?address, "device memory was not given back and is lost");
        }
    };
    if catch_unwind(AssertUnwindSafe(free)).is_err() {
        tracing::error!("giving device memory back panicked");
    }
}
