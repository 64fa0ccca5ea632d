//! Describing a model: its tensors by size, which of them are base, and the towers of blocks.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::{Bytes, Driver};
use offload_core::{
    BlockDesc, Company, EngineOptions, Layout, LayoutOptions, ModelDesc, PlanError, TensorId, TowerDesc,
    Units,
};
use pinned_pool::{HostStore, StoreOptions};

use crate::budget::Budget;
use crate::error::{Error, Result};
use crate::planned::{PlannedOffloader, Raised};
use crate::request::Request;
use crate::share::Share;

/// A model being described. Nothing is allocated until it is planned and its bytes are handed over.
///
/// Every tensor must end up in the base or in exactly one block; [`plan`](Self::plan) checks that.
#[derive(Debug, Clone)]
pub struct OffloaderBuilder {
    driver: Arc<dyn Driver>,
    names: Vec<String>,
    model: ModelDesc,
    budget: Budget,
    look_ahead: Option<u32>,
    granule: Option<Bytes>,
    options: EngineOptions,
    store: StoreOptions,
    share: Option<(Share, String, Company)>,
    raises: bool,
}

impl OffloaderBuilder {
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Self {
        Self {
            driver,
            names: Vec::new(),
            model: ModelDesc::default(),
            budget: Budget::Open,
            look_ahead: None,
            granule: None,
            options: EngineOptions::default(),
            store: StoreOptions::default(),
            share: None,
            raises: false,
        }
    }

    /// Describes a tensor of `size` bytes. The name is for reports and errors.
    pub fn tensor(&mut self, name: impl Into<String>, size: Bytes) -> TensorId {
        let id = TensorId(self.names.len() as u32);
        self.names.push(name.into());
        self.model.tensors.push(size);
        id
    }

    /// Says that tensors lie outside every tower: they are always resident.
    pub fn base(&mut self, tensors: impl IntoIterator<Item = TensorId>) -> &mut Self {
        self.model.base.extend(tensors);
        self
    }

    /// Adds a tower: named blocks in the order they run, each with its tensors in the order they are read.
    pub fn tower(&mut self, name: impl Into<String>, blocks: Vec<(String, Vec<TensorId>)>) -> &mut Self {
        let blocks = blocks.into_iter().map(|(name, tensors)| BlockDesc { name, tensors }).collect();
        self.model.towers.push(TowerDesc { name: name.into(), blocks });
        self
    }

    /// The device memory the weights may take; [`Budget::Open`] if not called.
    pub fn budget(&mut self, budget: Budget) -> &mut Self {
        self.budget = budget;
        self
    }

    /// The most units copied ahead of the one computed; the ring decides if not called.
    pub fn look_ahead(&mut self, units: u32) -> &mut Self {
        self.look_ahead = Some(units);
        self
    }

    /// The piece of physical memory to plan in, a multiple of the device's granularity; by model size if not called.
    pub fn granule(&mut self, granule: Bytes) -> &mut Self {
        self.granule = Some(granule);
        self
    }

    /// Ways of running that find mistakes, and how the device's staging ring is made.
    pub fn engine_options(&mut self, options: EngineOptions) -> &mut Self {
        self.options = options;
        self
    }

    /// How host memory is placed and page-locked: which levels are allowed, and how much. What is not page-locked stays
    /// where it is, in memory or in a file, and streams through the device's staging ring.
    pub fn store_options(&mut self, options: StoreOptions) -> &mut Self {
        self.store = options;
        self
    }

    /// Shares the device with the other models of `share`: a page pool, a transit ring, and pages of this size. The model comes
    /// to the device when it runs, and what it does not accept leaves then.
    pub fn share(&mut self, share: &Share, name: impl Into<String>, company: Company) -> &mut Self {
        self.granule = Some(share.granule());
        self.share = Some((share.clone(), name.into(), company));
        self
    }

    /// Raises a budget that is too small to the smallest that works, instead of refusing it.
    pub fn raise_budget(&mut self, raises: bool) -> &mut Self {
        self.raises = raises;
        self
    }

    /// Lays the model out and decides what is resident, whole blocks as units. Allocates nothing.
    ///
    /// # Errors
    /// A budget that cannot be one or is below the model's minimum, which the error names; a tensor that is in no
    /// block and not in the base, or in two places.
    pub fn plan(self) -> Result<PlannedOffloader> {
        let info = self.driver.device_info();
        let limit = self.budget.resolve(self.driver.memory_info()?)?;
        let options = LayoutOptions { granularity: info.granularity, granule: self.granule };
        let layout = Layout::new(&self.model, &options)?;
        let mut request = Request { limit, floor: limit, look_ahead: self.look_ahead };
        let units = Units::whole_blocks(&layout);
        let mut raised = None;
        let plan = match request.plan(&layout, &units) {
            Err(Error::Plan(PlanError::BudgetTooSmall { budget, minimum, largest_unit, .. }))
                if self.raises =>
            {
                (request.limit, request.floor) = (Some(minimum), Some(minimum));
                raised = Some(Raised { asked: budget, minimum, largest_unit });
                request.plan(&layout, &units)?
            }
            planned => planned?,
        };
        let line = Bytes(u64::from(layout.granules()) * layout.granule().0);
        let store = HostStore::builder(Arc::clone(&self.driver), line, self.store);
        Ok(PlannedOffloader {
            driver: self.driver,
            names: self.names,
            model: self.model,
            layout,
            request,
            plan,
            store,
            options: self.options,
            share: self.share,
            raised,
        })
    }
}
