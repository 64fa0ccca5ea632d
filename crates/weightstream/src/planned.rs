//! A planned model that takes its bytes group by group, and starts.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use gpu_driver::{Bytes, Driver};
use offload_core::{
    Engine, EngineDesc, EngineOptions, Layout, ModelDesc, Plan, Source, StoreSource, TensorId,
};
use pinned_pool::{HostStoreBuilder, Placed, SourceBytes, SourceTensor, Watch};
use vmm_alloc::PagePool;

use crate::error::{Error, Result};
use crate::offloader::{Offloader, named};
use crate::request::Request;

/// A model that is planned and not started. Hand over the bytes of every tensor, then [`start`](Self::start).
#[derive(Debug)]
pub struct PlannedOffloader {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) names: Vec<String>,
    pub(crate) model: ModelDesc,
    pub(crate) layout: Layout,
    pub(crate) request: Request,
    pub(crate) plan: Plan,
    pub(crate) store: HostStoreBuilder,
    pub(crate) options: EngineOptions,
}

impl PlannedOffloader {
    /// The plan, whole blocks as units.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Where tensors will lie.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Has the placing of host bytes followed, and ended if its caller wishes. To be called before any are handed over.
    pub fn watch(&mut self, watch: Watch) -> &mut Self {
        self.store.watch(watch);
        self
    }

    /// Hands over the bytes of a group of tensors, such as a block's, in memory or in a file, and says where each one's bytes
    /// live from now on.
    ///
    /// A tensor that was copied ([`Placed::is_copied`]) no longer needs its source: drop it before the next group, and
    /// RAM never holds more than the model and one group.
    ///
    /// # Errors
    /// A tensor that does not exist, was handed over before, or has another size than described; a file that was changed
    /// or cannot be read. None of the group is taken then.
    pub fn source<B: Into<SourceBytes>>(&mut self, group: Vec<(TensorId, B)>) -> Result<Vec<Placed>> {
        let mut sources = Vec::with_capacity(group.len());
        for (id, bytes) in group {
            let bytes = bytes.into();
            let described = self.described(id)?;
            if bytes.size() != described {
                let name = self.names[id.0 as usize].clone();
                return Err(Error::WrongSize { name, described, given: bytes.size() });
            }
            sources.push(SourceTensor::new(id.0, self.layout.offset(id), bytes));
        }
        Ok(self.store.place(&sources)?)
    }

    /// Maps the addresses and uploads what is resident. Blocks until that is done.
    ///
    /// # Errors
    /// A tensor that was not handed over, or a driver that refuses. Everything taken is given back then.
    pub fn start(self) -> Result<Offloader> {
        let reader = self.driver.device_info().ordinal;
        let store = Arc::new(StoreSource { store: self.store.finish()?, reader });
        let missing = || (0..self.names.len()).filter(|&id| store.store.source_of(id as u32).is_none());
        if let Some(first) = missing().next() {
            let first = self.names[first].clone();
            return Err(Error::Missing { missing: missing().count(), count: self.names.len(), first });
        }
        let limit = self.request.limit.unwrap_or_else(|| self.plan.physical_bytes());
        let pool = PagePool::new(Arc::clone(&self.driver), self.layout.granule(), limit)?;
        let engine = Engine::new(EngineDesc {
            driver: Arc::clone(&self.driver),
            layout: self.layout,
            plan: self.plan,
            pool,
            source: Arc::clone(&store) as Arc<dyn Source>,
            options: self.options,
        });
        let engine = engine.map_err(|error| named(error, &self.names))?;
        Ok(Offloader {
            engine,
            driver: self.driver,
            model: self.model,
            request: self.request,
            store,
            names: self.names,
            pace: Mutex::new(None),
            in_step: AtomicBool::new(false),
        })
    }

    fn described(&self, id: TensorId) -> Result<Bytes> {
        let count = self.names.len();
        self.model.tensors.get(id.0 as usize).copied().ok_or(Error::NoSuchTensor { tensor: id.0, count })
    }
}
