//! Describing a model, planning it, and handing its bytes over.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use checkpoint::Cancel;
use pyo3::prelude::*;
use weightstream::{
    Bytes, DeviceKind, EngineOptions, Levels, Offloader as Facade, Placed, PlannedOffloader, StoreOptions,
    TensorId, Watch, Work,
};

use crate::device::{Device, budget};
use crate::dlpack;
use crate::error::{Class, Failure, guarded};
use crate::offloader::Offloader;
use crate::process::OfProcess;
use crate::share::Share;
use crate::sources::Files;
use crate::watched::watched_by;

/// A tower as Python describes it: its name, and its blocks by name with their tensors.
type Tower = (String, Vec<(String, Vec<u32>)>);

/// Where a model shares its device: with whom, under which name, and whom it accepts; `None` is everyone.
type Company<'py> = (PyRef<'py, Share>, String, Option<Vec<String>>);

fn company_of(names: Option<Vec<String>>) -> weightstream::Company {
    names.map_or(weightstream::Company::Everyone, |names| {
        weightstream::Company::Of(names.into_iter().collect())
    })
}

/// A model planned and not started.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Plan {
    planned: Mutex<Option<OfProcess<PlannedOffloader>>>,
    files: Mutex<Files>,
    /// Ends the placing of host bytes, and counts what of them is page-locked.
    cancel: Cancel,
    locked: Arc<AtomicU64>,
    kind: DeviceKind,
    shares: bool,
}

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (device, tensors, base, towers, budget, look_ahead, poison, lock, place, threads = None))]
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
        lock: Option<u64>,
        place: Option<Company<'_>>,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let budget = self::budget(budget)?;
        let driver = device.driver()?;
        let place =
            place.map(|(share, name, company)| Ok::<_, PyErr>((share.share()?, name, company_of(company))));
        let place = place.transpose()?;
        let shares = place.is_some();
        let mut planned = py.detach(|| {
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
                if let Some((share, name, company)) = place {
                    builder.share(&share, name, company).raise_budget(true);
                }
                let mut store = StoreOptions { threads, ..StoreOptions::default() };
                if let Some(most) = lock {
                    store.levels = if most == 0 { Levels::NONE } else { Levels::ALL };
                    store.register_limit = Some(Bytes(most));
                }
                builder.store_options(store);
                if let Some(units) = look_ahead {
                    builder.look_ahead(units);
                }
                builder
                    .engine_options(EngineOptions { poison_after_use: poison, ..EngineOptions::default() });
                Ok(builder.plan()?)
            })
        })?;
        let (cancel, locked) = (Cancel::new(), Arc::new(AtomicU64::new(0)));
        let (asked, counted) = (cancel.clone(), Arc::clone(&locked));
        let watch = Watch::new().cancelled_by(move || asked.is_cancelled()).reports_to(move |work, bytes| {
            if work == Work::Locked {
                counted.fetch_add(bytes.0, Ordering::Relaxed);
            }
        });
        planned.watch(watch);
        Ok(Self {
            planned: Mutex::new(Some(OfProcess::new(planned))),
            files: Mutex::new(Files::default()),
            cancel,
            locked,
            kind: device.info().kind,
            shares,
        })
    }

    /// Bytes of the pages that are always resident, of the largest unit, of a page, and of all weights.
    fn room(&self, py: Python<'_>) -> PyResult<(u64, u64, u64, u64)> {
        Ok(py.detach(|| {
            guarded(|| {
                let mut planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
                let planned = planned.as_mut().and_then(OfProcess::get_mut).ok_or_else(started)?;
                let layout = planned.layout();
                let page = layout.granule().0;
                let spans = layout.blocks().iter().map(|block| block.span.end - block.span.start);
                let (largest, streamed) = (spans.clone().max().unwrap_or(0), spans.sum::<u64>());
                let base = u64::from(layout.base_granules()) * page;
                Ok((base, largest, page, base + streamed))
            })
        })?)
    }

    /// What of the model is resident, and which blocks stream, before anything is allocated: by block, the bytes and
    /// whether it is copied at each step.
    fn blocks(&self) -> Vec<(u64, bool)> {
        let planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(planned) = planned.as_ref().and_then(OfProcess::get) else { return Vec::new() };
        let units = planned.plan().units.iter();
        units.map(|unit| (unit.span.end - unit.span.start, !unit.is_resident())).collect()
    }

    fn raised(&self) -> Option<(u64, u64, String)> {
        let planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
        let raised = planned.as_ref().and_then(OfProcess::get)?.raised()?;
        Some((raised.asked.0, raised.minimum.0, raised.largest_unit.clone()))
    }

    /// Each entry is (tensor, address, size, keep-alive); each answer the address from now on, zero in a file, and a
    /// capsule if it changed.
    #[pyo3(signature = (tensors, watch = None, lock = true))]
    fn source<'py>(
        &self,
        py: Python<'py>,
        tensors: Vec<(u32, u64, u64, Py<PyAny>)>,
        watch: Option<&Bound<'py, PyAny>>,
        lock: bool,
    ) -> PyResult<Vec<(u64, Option<Bound<'py, PyAny>>)>> {
        let before: Vec<u64> = tensors.iter().map(|(_, address, ..)| *address).collect();
        let placed: Vec<Placed> = self.followed(py, watch, || {
            let mut files = self.files.lock().unwrap_or_else(PoisonError::into_inner);
            let mut group = Vec::with_capacity(tensors.len());
            for (id, address, size, keep) in tensors {
                group.push((TensorId(id), files.bytes_at(address, Bytes(size), keep)?));
            }
            let mut planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(planned.as_mut().and_then(OfProcess::get_mut).ok_or_else(started)?.source_as(group, lock)?)
        })?;
        let answer = |(placed, before): (Placed, u64)| {
            // What lies in a file is seen through the mapping that it was handed over from.
            let Some(bytes) = placed.bytes.memory() else { return Ok((0, None)) };
            let address = bytes.address().addr() as u64;
            let moved = placed.is_copied() || address != before;
            let capsule = if moved { Some(dlpack::host_capsule(py, bytes)?) } else { None };
            Ok((address, capsule))
        };
        placed.into_iter().zip(before).map(answer).collect()
    }

    #[pyo3(signature = (watch = None))]
    fn start(&self, py: Python<'_>, watch: Option<&Bound<'_, PyAny>>) -> PyResult<Offloader> {
        let started = self.followed(py, watch, || {
            let planned = self.planned.lock().unwrap_or_else(PoisonError::into_inner).take();
            Ok(planned.and_then(OfProcess::into_inner).ok_or_else(started)?.start()?)
        })?;
        Ok(Offloader::new(started, self.kind, self.shares))
    }
}

impl Plan {
    /// Runs `work` without the interpreter; if somebody watches, on a thread of its own, so that it can be ended.
    fn followed<T: Send>(
        &self,
        py: Python<'_>,
        watch: Option<&Bound<'_, PyAny>>,
        work: impl FnOnce() -> Result<T, Failure> + Send,
    ) -> PyResult<T> {
        match watch {
            Some(_) => watched_by(py, watch, &self.cancel, &self.locked, work),
            None => Ok(py.detach(|| guarded(work))?),
        }
    }
}

fn started() -> Failure {
    Failure::new(Class::State, "this plan was started already")
}
