//! A planned model that takes its bytes group by group, and starts.
#![forbid(unsafe_code)]

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use gpu_driver::{Bytes, Driver};
use offload_core::{
    Company, Engine, EngineDesc, EngineOptions, Layout, ModelDesc, Plan, Source, StoreSource, Tenant,
    TensorId,
};
use pinned_pool::{HostStoreBuilder, Placed, SourceBytes, SourceTensor, Watch};
use vmm_alloc::PagePool;

use crate::error::{Error, Result};
use crate::offloader::{Offloader, named};
use crate::request::Request;
use crate::share::Share;

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
    pub(crate) share: Option<(Share, String, Company)>,
    pub(crate) raised: Option<Raised>,
}

/// A budget that was too small, and what it was raised to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Raised {
    /// The budget as it was given, in bytes.
    pub asked: Bytes,
    /// The smallest that works, which counts.
    pub minimum: Bytes,
    /// The name of the unit that needs most of it beside the base; empty if there is none.
    pub largest_unit: String,
}

impl PlannedOffloader {
    /// The plan, whole blocks as units.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Whether the budget was raised, where the builder was allowed to.
    pub fn raised(&self) -> Option<&Raised> {
        self.raised.as_ref()
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
        self.source_as(group, true)
    }

    /// As [`source`](Self::source); without `lock` the group stays where its owner has it, and is not page-locked.
    ///
    /// # Errors
    /// As [`source`](Self::source).
    pub fn source_as<B: Into<SourceBytes>>(
        &mut self,
        group: Vec<(TensorId, B)>,
        lock: bool,
    ) -> Result<Vec<Placed>> {
        let mut sources = Vec::with_capacity(group.len());
        for (id, bytes) in group {
            let bytes = bytes.into();
            let described = self.described(id)?;
            if bytes.size() != described {
                let name = self.names[id.0 as usize].clone();
                return Err(Error::WrongSize { name, described, given: bytes.size() });
            }
            let source = SourceTensor::new(id.0, self.layout.offset(id), bytes);
            sources.push(if lock { source } else { source.unlocked() });
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
        let pool = if let Some((share, ..)) = &self.share {
            share.pool().clone()
        } else {
            let limit = self.request.limit.unwrap_or_else(|| self.plan.physical_bytes());
            PagePool::new(Arc::clone(&self.driver), self.layout.granule(), limit)?
        };
        let tenant = self
            .share
            .as_ref()
            .map(|(_, name, company)| tenant(name, company, &self.plan, self.request.limit, &self.layout));
        let desc = EngineDesc {
            driver: Arc::clone(&self.driver),
            layout: self.layout,
            plan: self.plan,
            pool,
            source: Arc::clone(&store) as Arc<dyn Source>,
            options: self.options,
        };
        let engine = match (&self.share, &tenant) {
            (Some((share, ..)), Some(tenant)) => share.engine(desc, tenant.most),
            _ => Engine::new(desc),
        };
        let engine = engine.map_err(|error| named(error, &self.names))?;
        let engine = Arc::new(engine);
        let place = self.share.zip(tenant).map(|((share, ..), tenant)| share.join(tenant, &engine));
        Ok(Offloader {
            place,
            engine,
            driver: self.driver,
            model: self.model,
            request: Mutex::new(self.request),
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

/// A planned model as those it shares its device with see it.
fn tenant(name: &str, company: &Company, plan: &Plan, limit: Option<Bytes>, layout: &Layout) -> Tenant {
    Tenant {
        name: name.into(),
        own: plan.own_granules,
        ring: plan.ring_granules,
        most: most_pages(plan, limit, layout),
        allowed: limit.map_or(u32::MAX, |limit| u32::try_from(limit.0 / plan.granule.0).unwrap_or(u32::MAX)),
        company: company.clone(),
    }
}

/// The most pages that a plan within a limit takes.
pub(crate) fn most_pages(plan: &Plan, limit: Option<Bytes>, layout: &Layout) -> u32 {
    let allowed = limit.map_or(u64::MAX, |limit| limit.0 / plan.granule.0);
    let most = allowed.min(u64::from(layout.granules())) as u32;
    most.max(plan.own_granules + plan.ring_granules)
}
