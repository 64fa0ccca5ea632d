//! A model on an emulated device, whose computation compares the bytes it reads with the bytes it should read.

use std::cell::Cell;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver, Faulty, HostDriver, StreamHandle, Verb};
use pinned_pool::{HostStore, PendingRead, StoreOptions, TransferStream};
use vmm_alloc::PagePool;

use super::desc::{Compute, RigDesc, device};
use super::rng::Rng;
use super::source::{Mixed, ModelFile};
use crate::engine::{Engine, EngineDesc, EngineError};
use crate::model::{TensorId, UnitId};
use crate::plan::Plan;

pub(super) type Device = Faulty<HostDriver>;

/// What is wrong with a read.
type Wrong = String;

pub(super) struct Rig {
    // The engine is dropped first: its address range is held by the streams.
    pub(super) engine: Engine,
    pub(super) device: Arc<Device>,
    pub(super) host: Arc<HostDriver>,
    pub(super) pool: PagePool,
    /// The line as it should be, and which of its bytes belong to a tensor.
    image: Vec<u8>,
    tensors: Vec<bool>,
    streams: Vec<TransferStream>,
    compute: Compute,
    turn: usize,
    /// The stream of the engine's latest call that went well: computation on another is not ordered.
    told: Cell<usize>,
    reads: Vec<(u64, PendingRead)>,
    /// If any of the model's bytes are in one.
    pub(super) file: Option<ModelFile>,
}

impl Rig {
    pub(super) fn new(desc: &RigDesc, plan: Plan, limit: u64) -> Result<Self, EngineError> {
        let host = Arc::new(device(desc));
        let device = Arc::new(Faulty::new(Arc::clone(&host)));
        Self::on(desc, plan, limit, &host, &device)
    }

    pub(super) fn on(
        desc: &RigDesc,
        plan: Plan,
        limit: u64,
        host: &Arc<HostDriver>,
        device: &Arc<Device>,
    ) -> Result<Self, EngineError> {
        let layout = desc.layout();
        let driver: Arc<dyn Driver> = Arc::<Device>::clone(device);
        let line = Bytes(u64::from(layout.granules()) * layout.granule().0);
        let options = StoreOptions { slab_only: true, threads: Some(1), ..StoreOptions::default() };
        let store = HostStore::builder(Arc::clone(&driver), line, options);
        let (mut image, mut tensors) = (vec![0; line.as_usize()], vec![false; line.as_usize()]);
        let mut rng = Rng::new(desc.seed);
        let mut given = Vec::new();
        for tensor in (0..layout.tensors() as u32).map(TensorId) {
            let bytes = Arc::new(rng.bytes(layout.bytes(tensor).as_usize()));
            let (start, end) = (layout.offset(tensor) as usize, layout.offset(tensor) as usize + bytes.len());
            image[start..end].copy_from_slice(&bytes);
            tensors[start..end].fill(true);
            given.push((tensor.0, start as u64, bytes));
        }
        let (source, file) = Mixed::new(store, desc.levels, given)?;
        let source = Arc::new(source);
        let pool = PagePool::new(Arc::clone(&driver), layout.granule(), Bytes(limit))?;
        let streams = match desc.compute {
            Compute::Calling => 1,
            Compute::Streams(count) => count,
        };
        let streams = (0..streams).map(|_| TransferStream::new(Arc::clone(&driver)));
        let streams = streams.collect::<Result<Vec<_>, _>>()?;
        let options = desc.options;
        let engine =
            Engine::unmapped(EngineDesc { driver, layout, plan, pool: pool.clone(), source, options })?;
        engine.lock().set_mutant(desc.mutant);
        engine.map()?;
        let (host, device) = (Arc::clone(host), Arc::clone(device));
        Ok(Self {
            engine,
            device,
            host,
            pool,
            image,
            tensors,
            streams,
            compute: desc.compute,
            turn: 0,
            told: Cell::new(0),
            reads: Vec::new(),
            file,
        })
    }

    /// The stream that computes now.
    pub(super) fn stream(&self) -> StreamHandle {
        match self.compute {
            Compute::Calling => StreamHandle::DEFAULT,
            Compute::Streams(_) => self.streams[self.turn].handle(),
        }
    }

    /// Goes on with the next stream.
    pub(super) fn next_stream(&mut self) {
        self.turn = (self.turn + 1) % self.streams.len();
    }

    pub(super) fn begin(&self) -> Result<(), EngineError> {
        self.tell(self.engine.begin_step(self.stream()))
    }

    pub(super) fn end(&self) -> Result<(), EngineError> {
        self.tell(self.engine.end_step(self.stream()))
    }

    pub(super) fn enter(&self, unit: UnitId) -> Result<(), EngineError> {
        self.tell(self.engine.enter(unit, self.stream()))
    }

    pub(super) fn leave(&self, unit: UnitId) -> Result<(), EngineError> {
        self.tell(self.engine.leave(unit, self.stream()))
    }

    pub(super) fn hold(&self, unit: UnitId) -> Result<(), EngineError> {
        self.tell(self.engine.hold(&[unit], self.stream()))
    }

    fn tell(&self, called: Result<(), EngineError>) -> Result<(), EngineError> {
        called.inspect(|()| self.told.set(self.turn))
    }

    /// Reads the unit's bytes as the computation would.
    pub(super) fn compute(&mut self, unit: UnitId) -> Result<(), Failure> {
        let span = self.engine.plan().units[unit.0 as usize].span.clone();
        self.read(span.start, span.end - span.start)
    }

    fn read(&mut self, offset: u64, bytes: u64) -> Result<(), Failure> {
        let space = Arc::clone(self.engine.space());
        let stream = &self.streams[self.told.get()];
        match self.compute {
            Compute::Calling => {
                let mut read = vec![0; bytes as usize];
                stream.read_back(&space, offset, &mut read).map_err(|error| Failure::Error(error.into()))?;
                self.compare(offset, &read).map_err(Failure::Wrong)
            }
            Compute::Streams(_) => {
                let read = stream.begin_read(&space, offset, Bytes(bytes));
                self.reads.push((offset, read.map_err(|error| Failure::Error(error.into()))?));
                Ok(())
            }
        }
    }

    /// Reads what is resident in any case.
    pub(super) fn compute_base(&mut self) -> Result<(), Failure> {
        let layout = self.engine.layout();
        let bytes = u64::from(layout.base_granules()) * layout.granule().0;
        self.read(0, bytes)
    }

    /// Waits for all computation so far, and says what was wrong with it.
    pub(super) fn finish(&mut self) -> Result<(), Failure> {
        let mut result = Ok(());
        for (offset, read) in std::mem::take(&mut self.reads) {
            let read = read.finish().map_err(|error| Failure::Error(error.into()));
            result = result.and_then(|()| self.compare(offset, &read?).map_err(Failure::Wrong));
        }
        result
    }

    fn compare(&self, offset: u64, read: &[u8]) -> Result<(), Wrong> {
        let start = offset as usize;
        let should = self.image[start..].iter().zip(&self.tensors[start..]);
        let wrong = read.iter().zip(should).position(|(is, (should, tensor))| *tensor && is != should);
        match wrong {
            Some(at) => Err(format!("byte {} of the line reads {:#x}", start + at, read[at])),
            None => Ok(()),
        }
    }

    /// Enters, computes and leaves a unit.
    pub(super) fn visit(&mut self, unit: UnitId) -> Result<(), Failure> {
        self.enter(unit)?;
        self.compute(unit)?;
        Ok(self.leave(unit)?)
    }

    /// A whole step over these units, computed to the end.
    pub(super) fn step(&mut self, units: &[UnitId]) -> Result<(), Failure> {
        self.begin()?;
        for &unit in units {
            self.visit(unit)?;
        }
        self.end()?;
        self.finish()
    }

    /// Every unit once, in the plan's order.
    pub(super) fn whole_step(&mut self) -> Result<(), Failure> {
        self.step(&self.engine.plan().order.clone())
    }
}

impl Rig {
    /// Lets faults strike while the engine goes, but not while the computation's own streams do. Gives back how often each
    /// verb was called till then.
    pub(super) fn drop_engine_then_streams(self) -> Vec<(Verb, u64)> {
        let Self { engine, pool, streams, device, .. } = self;
        drop(engine);
        drop(pool);
        let calls = Verb::ALL.iter().map(|&verb| (verb, device.calls(verb))).collect();
        device.reset();
        for stream in &streams {
            stream.drain().unwrap();
        }
        calls
    }
}

/// How a step or a whole case ended badly.
#[derive(Debug)]
pub(super) enum Failure {
    /// A call failed.
    Error(EngineError),
    /// Computation read wrong bytes.
    Wrong(Wrong),
    /// More memory was held than allowed, or something was left behind at the end.
    Left(String),
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Error(error) => write!(f, "{error}"),
            Self::Wrong(what) | Self::Left(what) => write!(f, "{what}"),
        }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        Self::Error(error)
    }
}
