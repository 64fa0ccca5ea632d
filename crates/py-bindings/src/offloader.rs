//! A model being streamed, as Python sees it.
//!
//! Blocking calls release the interpreter. On CUDA entering and leaving enqueue only, and releasing would cost as much
//! as they do; on the emulator they wait for copies, and where not all of the model is page-locked for reads, so it is
//! released there.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use pyo3::prelude::*;
use weightstream::{
    BlockId, Bytes, DeviceKind, EngineError, Offloader as Facade, StreamHandle, TensorId, UnitId,
};

use crate::dlpack;
use crate::error::{Class, Failure, guarded};
use crate::process::OfProcess;
use crate::startup::StartupReport;

/// A model being streamed.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Offloader {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    /// Empty once closed: dropping the facade unlocks host memory.
    facade: RwLock<Option<OfProcess<Facade>>>,
    /// Whether entering and leaving wait.
    pub(crate) waits: bool,
    /// Whether other models are on the device, so that beginning a step may take a switch.
    shares: bool,
}

impl Inner {
    /// Gives back what is preloaded, without the interpreter; nothing while the model is being closed.
    pub(crate) fn release_preload(&self, bytes: Bytes) -> Result<Bytes, weightstream::Error> {
        let Ok(facade) = self.facade.try_read() else { return Ok(Bytes::ZERO) };
        facade
            .as_ref()
            .and_then(OfProcess::get)
            .map_or(Ok(Bytes::ZERO), |facade| facade.release_preload(bytes))
    }

    /// Runs `call` on the facade, with the interpreter released if `waits`.
    pub(crate) fn with<T: Send>(
        &self,
        py: Python<'_>,
        waits: bool,
        call: impl FnOnce(&Facade) -> Result<T, weightstream::Error> + Send,
    ) -> PyResult<T> {
        let run = || {
            guarded(|| {
                let facade = self.facade.read().unwrap_or_else(PoisonError::into_inner);
                let facade = facade
                    .as_ref()
                    .and_then(OfProcess::get)
                    .ok_or(weightstream::Error::Engine(EngineError::Closed))?;
                Ok(call(facade)?)
            })
        };
        Ok(if waits { py.detach(run) } else { run() }?)
    }
}

fn cuts_of(cuts: BTreeMap<u32, Vec<u32>>) -> BTreeMap<BlockId, Vec<TensorId>> {
    let ids = |tensors: Vec<u32>| tensors.into_iter().map(TensorId).collect();
    cuts.into_iter().map(|(block, tensors)| (BlockId(block), ids(tensors))).collect()
}

fn order_of(order: Option<Vec<u32>>) -> Option<Vec<UnitId>> {
    order.map(|order| order.into_iter().map(UnitId).collect())
}

impl Offloader {
    pub(crate) fn new(facade: Facade, kind: DeviceKind, shares: bool) -> Self {
        Self {
            inner: Arc::new(Inner {
                waits: kind == DeviceKind::Host || facade.is_staged(),
                shares,
                facade: RwLock::new(Some(OfProcess::new(facade))),
            }),
        }
    }
}

#[pymethods]
impl Offloader {
    fn address(&self, py: Python<'_>, tensor: u32) -> PyResult<u64> {
        self.inner.with(py, false, |facade| Ok(facade.address(TensorId(tensor))?.0))
    }

    fn capsule<'py>(&self, py: Python<'py>, tensor: u32) -> PyResult<Bound<'py, PyAny>> {
        let (lease, address, size) = self.inner.with(py, false, |facade| {
            Ok((facade.lease(), facade.address(TensorId(tensor))?, facade.size(TensorId(tensor))?))
        })?;
        dlpack::device_capsule(py, lease, address, size)
    }

    fn unit_of(&self, py: Python<'_>, tensor: u32) -> PyResult<Option<u32>> {
        self.inner.with(py, false, |facade| Ok(facade.unit_of(TensorId(tensor))?.map(|unit| unit.0)))
    }

    fn begin_step(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        self.inner
            .with(py, self.inner.waits || self.inner.shares, |facade| facade.begin_step(StreamHandle(stream)))
    }

    fn end_step(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        self.inner.with(py, self.inner.waits, |facade| facade.end_step(StreamHandle(stream)))
    }

    fn enter(&self, py: Python<'_>, unit: u32, stream: u64) -> PyResult<()> {
        self.inner.with(py, self.inner.waits, |facade| facade.enter(UnitId(unit), StreamHandle(stream)))
    }

    fn leave(&self, py: Python<'_>, unit: u32, stream: u64) -> PyResult<()> {
        self.inner.with(py, self.inner.waits, |facade| facade.leave(UnitId(unit), StreamHandle(stream)))
    }

    fn abandon_step(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.with(py, false, |facade| {
            facade.abandon_step();
            Ok(())
        })
    }

    fn segment(
        &self,
        py: Python<'_>,
        cuts: BTreeMap<u32, Vec<u32>>,
        order: Option<Vec<u32>>,
        everywhere: bool,
    ) -> PyResult<Vec<u32>> {
        let (cuts, order) = (cuts_of(cuts), order_of(order));
        let units = self.inner.with(py, true, |facade| {
            if everywhere { facade.segment_everywhere(&cuts, order) } else { facade.segment(&cuts, order) }
        })?;
        Ok(units.into_iter().map(|unit| unit.0).collect())
    }

    fn predict(
        &self,
        py: Python<'_>,
        cuts: BTreeMap<u32, Vec<u32>>,
        order: Option<Vec<u32>>,
    ) -> PyResult<f64> {
        let (cuts, order) = (cuts_of(cuts), order_of(order));
        self.inner.with(py, true, |facade| facade.predict(&cuts, order))
    }

    fn time_next_step(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.with(py, false, |facade| {
            facade.time_next_step();
            Ok(())
        })
    }

    fn trace_next_step(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.with(py, false, |facade| {
            facade.trace_next_step();
            Ok(())
        })
    }

    fn take_step_trace(&self, py: Python<'_>) -> PyResult<Option<StartupReport>> {
        self.inner.with(py, false, |facade| Ok(facade.take_step_trace().map(StartupReport)))
    }

    fn learn_pace(&self, py: Python<'_>) -> PyResult<bool> {
        self.inner.with(py, false, |facade| Ok(facade.learn_pace()))
    }

    fn gain(
        &self,
        py: Python<'_>,
        cuts: BTreeMap<u32, Vec<u32>>,
        order: Option<Vec<u32>>,
    ) -> PyResult<Option<(f64, f64, f64)>> {
        let (cuts, order) = (cuts_of(cuts), order_of(order));
        let gain = self.inner.with(py, true, |facade| facade.gain(&cuts, order))?;
        Ok(gain.map(|gain| (gain.now, gain.then, gain.switch)))
    }

    /// `None` is without limit.
    fn budget(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.inner.with(py, false, |facade| Ok(facade.budget().map(|bytes| bytes.0)))
    }

    fn set_budget(&self, py: Python<'_>, budget: &Bound<'_, PyAny>) -> PyResult<()> {
        let budget = crate::device::budget(budget)?;
        self.inner.with(py, true, |facade| facade.set_budget(budget))
    }

    fn preloaded(&self, py: Python<'_>) -> PyResult<u64> {
        self.inner.with(py, false, |facade| Ok(facade.preloaded().0))
    }

    fn preload(&self, py: Python<'_>, limit: u64) -> PyResult<()> {
        self.inner.with(py, true, |facade| facade.preload(Bytes(limit)))
    }

    fn release_preload(&self, py: Python<'_>, bytes: u64) -> PyResult<u64> {
        self.inner.with(py, true, |facade| Ok(facade.release_preload(Bytes(bytes))?.0))
    }

    fn hold(&self, py: Python<'_>, tensors: Vec<u32>, stream: u64) -> PyResult<Hold> {
        let tensors: Vec<TensorId> = tensors.into_iter().map(TensorId).collect();
        let units = self.inner.with(py, true, |facade| facade.hold(&tensors, StreamHandle(stream)))?;
        Ok(Hold { of: Arc::clone(&self.inner), units: RwLock::new(units) })
    }

    /// Whether the model is on the device; false once closed.
    fn is_here(&self) -> bool {
        let facade = self.inner.facade.read().unwrap_or_else(PoisonError::into_inner);
        facade.as_ref().and_then(OfProcess::get).is_some_and(Facade::is_here)
    }

    fn arrive(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        self.inner.with(py, true, |facade| facade.arrive(StreamHandle(stream)))
    }

    fn vacate(&self, py: Python<'_>) -> PyResult<()> {
        self.inner.with(py, true, Facade::vacate)
    }

    fn stats(&self, py: Python<'_>) -> PyResult<String> {
        let stats = self.inner.with(py, false, |facade| Ok(facade.stats()))?;
        json(&stats)
    }

    fn report(&self, py: Python<'_>) -> PyResult<String> {
        let report = self.inner.with(py, false, |facade| Ok(facade.report()))?;
        json(&report)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        Ok(py.detach(|| {
            guarded(|| {
                let mut facade = self.inner.facade.write().unwrap_or_else(PoisonError::into_inner);
                if let Some(open) = facade.as_ref().and_then(OfProcess::get) {
                    open.close(StreamHandle::DEFAULT)?;
                }
                *facade = None;
                Ok(())
            })
        })?)
    }
}

/// Tensors kept present out of turn.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Hold {
    of: Arc<Inner>,
    units: RwLock<Vec<UnitId>>,
}

#[pymethods]
impl Hold {
    fn release(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let units = std::mem::take(&mut *self.units.write().unwrap_or_else(PoisonError::into_inner));
        let closed = self.of.facade.read().unwrap_or_else(PoisonError::into_inner).is_none();
        if units.is_empty() || closed {
            return Ok(());
        }
        self.of.with(py, true, |facade| facade.release(&units, StreamHandle(stream)))
    }
}

fn json(value: &impl serde::Serialize) -> PyResult<String> {
    serde_json::to_string(value).map_err(|error| Failure::new(Class::Internal, error.to_string()).into())
}
