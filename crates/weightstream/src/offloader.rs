//! A model being streamed: the calls around its forwards, and its numbers.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use gpu_driver::{Bytes, DeviceAddress, Driver, StreamHandle};
use offload_core::{Engine, EngineError, EngineStats, ModelDesc, Plan, StoreSource, TensorId, UnitId};
use pinned_pool::{HostBytes, SourceBytes};
use vmm_alloc::AddressSpace;

use crate::builder::OffloaderBuilder;
use crate::error::{Error, Result};
use crate::pace::Pace;
use crate::report::Report;
use crate::request::Request;
use crate::share::Place;

/// Streams one model through a memory budget.
///
/// ```text
///   begin_step ─ enter(u) ─ use u's tensors at their addresses ─ leave(u) ─ … ─ end_step
/// ```
///
/// Addresses never change. What lies behind them is right between `enter` and `leave` of the tensor's unit, for work
/// submitted to the stream that was named; resident tensors are always right.
#[derive(Debug)]
pub struct Offloader {
    /// Its place among the models of its device. Goes before the engine does.
    pub(crate) place: Option<Place>,
    pub(crate) engine: Arc<Engine>,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) model: ModelDesc,
    pub(crate) request: Mutex<Request>,
    pub(crate) store: Arc<StoreSource>,
    pub(crate) names: Vec<String>,
    /// What was measured of the plan in place or one before it.
    pub(crate) pace: Mutex<Option<Pace>>,
    /// Whether a step is under way, which has looked at the files; only a hint to spare looking at each visit.
    pub(crate) in_step: AtomicBool,
}

/// An error with names where the engine has numbers.
pub(crate) fn named(error: EngineError, names: &[String]) -> Error {
    match error {
        EngineError::Unread { tensor, cause } => {
            let name = names.get(tensor.0 as usize).cloned().unwrap_or_default();
            Error::Unread { name, cause }
        }
        other => other.into(),
    }
}

impl Offloader {
    /// Begins the description of a model for a device.
    pub fn builder(driver: Arc<dyn Driver>) -> OffloaderBuilder {
        OffloaderBuilder::new(driver)
    }

    /// Where a tensor is, for the life of the address range.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn address(&self, tensor: TensorId) -> Result<DeviceAddress> {
        self.check(tensor)?;
        Ok(self.engine.address(tensor))
    }

    /// A tensor's size.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn size(&self, tensor: TensorId) -> Result<Bytes> {
        self.check(tensor)?;
        Ok(self.engine.layout().bytes(tensor))
    }

    /// Where a tensor's bytes are, in host memory or in a file.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn source_bytes(&self, tensor: TensorId) -> Result<SourceBytes> {
        self.check(tensor)?;
        let missing = Error::NoSuchTensor { tensor: tensor.0, count: self.engine.layout().tensors() };
        self.store.store.source_of(tensor.0).cloned().ok_or(missing)
    }

    /// Where a tensor's bytes are in host memory.
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`]; also if they are in a file, as [`source_bytes`](Self::source_bytes) says.
    pub fn host_bytes(&self, tensor: TensorId) -> Result<HostBytes> {
        self.check(tensor)?;
        let missing = Error::NoSuchTensor { tensor: tensor.0, count: self.engine.layout().tensors() };
        self.store.store.bytes_of(tensor.0).cloned().ok_or(missing)
    }

    /// Whether entering a unit may wait for its bytes to be read: not all of the model is page-locked.
    pub fn is_staged(&self) -> bool {
        self.engine.is_staged()
    }

    /// The address range. Hold a clone for as long as anything may use an address in it.
    pub fn lease(&self) -> Arc<AddressSpace> {
        Arc::clone(self.engine.space())
    }

    /// The unit a tensor streams with now; `None` if all of its bytes are resident.
    ///
    /// A tensor that straddles two units belongs to both; this gives the first. Cuts lie between tensors, so that does
    /// not happen to units made by [`segment`](Self::segment).
    ///
    /// # Errors
    /// [`Error::NoSuchTensor`].
    pub fn unit_of(&self, tensor: TensorId) -> Result<Option<UnitId>> {
        self.check(tensor)?;
        let plan = self.engine.plan();
        let start = self.engine.layout().offset(tensor);
        let end = start + self.engine.layout().bytes(tensor).0;
        let touches = |unit: &offload_core::UnitPlan| unit.streamed.start < end && start < unit.streamed.end;
        Ok(plan.units.iter().position(touches).map(|unit| UnitId(unit as u32)))
    }

    /// The plan in place.
    pub fn plan(&self) -> Arc<Plan> {
        self.engine.plan()
    }

    /// A step begins; what the one before left open is closed.
    ///
    /// # Errors
    /// A file of the model that is no longer what it was: its bytes may be of another model. Else see
    /// [`Engine::begin_step`].
    pub fn begin_step(&self, stream: StreamHandle) -> Result<()> {
        self.store.store.check_unchanged()?;
        self.running(stream, || self.engine.begin_step(stream))?;
        self.in_step.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// A step ends.
    ///
    /// # Errors
    /// A file of the model that was changed since the step began: what the step computed may be wrong. Else see
    /// [`Engine::end_step`]. The step has ended all the same.
    pub fn end_step(&self, stream: StreamHandle) -> Result<()> {
        self.in_step.store(false, Ordering::Relaxed);
        self.engine.end_step(stream)?;
        Ok(self.store.store.check_unchanged()?)
    }

    /// A unit's turn begins, for work submitted to `stream` from here on.
    ///
    /// # Errors
    /// Outside a step, a file of the model that is no longer what it was. Else see [`Engine::enter`].
    pub fn enter(&self, unit: UnitId, stream: StreamHandle) -> Result<()> {
        if self.in_step.load(Ordering::Relaxed) {
            return self.engine.enter(unit, stream).map_err(|error| self.named(error));
        }
        self.store.store.check_unchanged()?;
        self.running(stream, || self.engine.enter(unit, stream))
    }

    /// A unit's turn ends.
    ///
    /// # Errors
    /// See [`Engine::leave`].
    pub fn leave(&self, unit: UnitId, stream: StreamHandle) -> Result<()> {
        Ok(self.engine.leave(unit, stream)?)
    }

    /// Gives up a step whose thread will not end it.
    pub fn abandon_step(&self) {
        self.in_step.store(false, Ordering::Relaxed);
        self.engine.abandon_step();
    }

    pub(crate) fn request(&self) -> Request {
        *self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps tensors present until [`release`](Self::release), for use outside their turn. Gives the units to release.
    ///
    /// # Errors
    /// A file of the model that is no longer what it was. Else see [`Engine::hold`]: units that share ring memory cannot be
    /// held together.
    pub fn hold(&self, tensors: &[TensorId], stream: StreamHandle) -> Result<Vec<UnitId>> {
        self.store.store.check_unchanged()?;
        let mut units = BTreeSet::new();
        for &tensor in tensors {
            units.extend(self.unit_of(tensor)?);
        }
        let units: Vec<UnitId> = units.into_iter().collect();
        self.running(stream, || self.engine.hold(&units, stream))?;
        Ok(units)
    }

    /// Ends a [`hold`](Self::hold).
    ///
    /// # Errors
    /// See [`Engine::release`].
    pub fn release(&self, units: &[UnitId], stream: StreamHandle) -> Result<()> {
        Ok(self.engine.release(units, stream)?)
    }

    /// Counts since the start.
    pub fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    /// The plan, the memory and the counts, as data.
    pub fn report(&self) -> Report {
        Report::new(&self.driver, &self.engine, &self.model, &self.store.store)
    }

    /// Waits for everything submitted, also for what `stream` holds, and gives all device memory back. Addresses still
    /// leased read 0xFF afterwards. Blocks. Closing twice is no error.
    ///
    /// # Errors
    /// See [`Engine::close`].
    pub fn close(&self, stream: StreamHandle) -> Result<()> {
        self.engine.close(stream)?;
        if let Some(place) = &self.place {
            place.part();
        }
        Ok(())
    }

    /// Whether the model is on the device. Always, unless it shares the device with others.
    pub fn is_here(&self) -> bool {
        self.engine.is_here()
    }

    /// Brings a model that shares its device to it, as its next step would. Blocks until it is there.
    ///
    /// # Errors
    /// [`Error::Busy`], [`Error::Crowded`], or the driver's. Both models run right afterwards.
    pub fn arrive(&self, stream: StreamHandle) -> Result<()> {
        self.running(stream, || Ok(()))
    }

    /// Takes a model that shares its device off it, until it runs again. Blocks until its work has run. Does nothing to one
    /// that is alone.
    ///
    /// # Errors
    /// A step under way or a held unit: nothing was changed. Or the driver's; the next step makes it good.
    pub fn vacate(&self) -> Result<()> {
        self.place.as_ref().map_or(Ok(()), |place| place.vacate().map_err(|error| self.renamed(error)))
    }

    /// Does what runs the model: brings it to the device before, and keeps others from sending it away meanwhile.
    fn running(&self, stream: StreamHandle, call: impl FnOnce() -> Result<(), EngineError>) -> Result<()> {
        let done = match &self.place {
            Some(place) => place.running(stream, call),
            None => call().map_err(Error::from),
        };
        done.map_err(|error| self.renamed(error))
    }

    pub(crate) fn replan(&self, plan: Plan) -> Result<()> {
        let done = match &self.place {
            Some(place) => place.replan(plan),
            None => self.engine.replan(plan).map_err(Error::from),
        };
        done.map_err(|error| self.renamed(error))
    }

    pub(crate) fn renamed(&self, error: Error) -> Error {
        match error {
            Error::Engine(error) => self.named(error),
            other => other,
        }
    }

    /// An error with names where the engine has numbers.
    fn named(&self, error: EngineError) -> Error {
        named(error, &self.names)
    }

    pub(crate) fn check(&self, tensor: TensorId) -> Result<()> {
        let count = self.engine.layout().tensors();
        if (tensor.0 as usize) < count {
            Ok(())
        } else {
            Err(Error::NoSuchTensor { tensor: tensor.0, count })
        }
    }
}
