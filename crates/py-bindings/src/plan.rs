//! Describing a model, planning it, and handing its bytes over.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use weightstream::{
    Bytes, DeviceKind, EngineOptions, Offloader as Facade, Placed, PlannedOffloader, TensorId,
};

use crate::device::{Device, budget};
use crate::dlpack;
use crate::error::{Class, Failure, guarded};
use crate::offloader::Offloader;
use crate::process::OfProcess;

/// A tower as Python describes it: its name, and its blocks by name with their tensors.
type Tower = (String, Vec<(String, Vec<u32>)>);

/// A model planned and not started.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Plan {
    planned: Mutex<Option<OfProcess<PlannedOffloader>>>,
    kind: DeviceKind,
}

#[pymethods]
impl Plan {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "the Python side passes them by position, in one place")]
    fn new(
        py: Python<'_>,
        device: &Device,
        tensors: Vec<(String, u64)>,
        base: Vec<u32>,
        towers: Vec<Tower>,
        budget: &Bound<'_, PyAny>,
        look_ahead: Option<u32>,
        poison: bool,
    ) -> PyResult<Self> {
        let budget = self::budget(budget)?;
        let driver = device.driver()?;
        let planned = py.detach(|| {
            guarded(|| {
                let mut builder = Facade::builder(driver);
                for (name, size) in tensors {
                    builder.tensor(name, Bytes(size));
                }
                builder.base(base.into_iter().map(TensorId)).budget(budget);
                for (name, blocks) in towers {
                    let ids = |tensors: Vec<u32>| tensors.into_iter().map(TensorId).collect();
                    builder.tower(
                        name,
                        blocks.into_iter().map(|(name, tensors)| (name, ids(tensors))).collect(),
                    );
                }
                if let Some(units) = look_ahead {
                    builder.look_ahead(units);
                }
                builder
                    .engine_options(EngineOptions { poison_after_use: poison, ..EngineOptions::default() });
                Ok(builder.plan()?)
            })
        })?;
        Ok(Self { planned: Mutex::new(Some(OfProcess::new(planned))), kind: device.info().kind })
    }

    /// Each entry is (tensor, address, size, keep-alive); each answer the address from now on, and a capsule if it changed.
    fn source<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<(u32, u64, u64, Py<PyAny>)>,
    ) -> PyResult<Vec<(u64, Option<Bound<'py, PyAny>>)>> {
        let placed: Vec<Placed> = py.detach(|| {
            guarded(|| {
                let group = tensors
                    .into_iter()
                    .map(|(id, address, size, keep)| {
                        (TensorId(id), dlpack::host_bytes(address, Bytes(size), keep))
                    })
                    .collect();
                let mut planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(planned.as_mut().and_then(OfProcess::get_mut).ok_or_else(started)?.source(group)?)
            })
        })?;
        placed
            .into_iter()
            .map(|placed| {
                // What was handed over in memory stays there.
                let Some(bytes) = placed.bytes.memory() else { return Ok((0, None)) };
                let capsule = if placed.is_copied() { Some(dlpack::host_capsule(py, bytes)?) } else { None };
                Ok((bytes.address().addr() as u64, capsule))
            })
            .collect()
    }

    fn start(&self, py: Python<'_>) -> PyResult<Offloader> {
        let started = py.detach(|| {
            guarded(|| {
                let planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner).take();
                Ok(planned.and_then(OfProcess::into_inner).ok_or_else(started)?.start()?)
            })
        })?;
        Ok(Offloader::new(started, self.kind))
    }
}

fn started() -> Failure {
    Failure::new(Class::State, "this plan was started already")
}
