//! Another budget for a model that runs, between its steps.
#![forbid(unsafe_code)]

use std::sync::PoisonError;

use gpu_driver::{Bytes, MemoryInfo};

use crate::budget::Budget;
use crate::error::Result;
use crate::offloader::Offloader;
use crate::request::Request;

impl Offloader {
    /// The device memory that the weights may take, resolved to bytes; `None` is without limit.
    pub fn budget(&self) -> Option<Bytes> {
        self.request().limit
    }

    /// Changes the device memory that the weights may take, between steps; units and addresses stay. A higher budget copies
    /// what becomes resident, a lower one copies nothing. Blocks until the model's work has run. An open budget counts what
    /// the model has on the device as free.
    ///
    /// Of models that share a device, those that ran longest ago leave if a higher budget needs their room, or the model itself
    /// if the others ran since. A model that is away takes its new budget when it comes.
    ///
    /// # Errors
    /// A budget that cannot be one or is below the model's minimum, which the error names, or that what never leaves a shared
    /// device has no room for; a step under way or a held unit: nothing was changed. If the driver fails, a higher budget
    /// is as if it had not been asked for, and a lower one is made true by the next step; [`budget`](Self::budget) says which.
    pub fn set_budget(&self, budget: Budget) -> Result<()> {
        let mut request = self.request.lock().unwrap_or_else(PoisonError::into_inner);
        let limit = budget.resolve(self.memory_without_this()?)?;
        if limit == request.limit {
            return Ok(());
        }
        let asked = Request { limit, ..*request };
        let layout = self.engine.layout();
        asked.check(layout)?;
        let lower = limit.is_some_and(|limit| request.limit.is_none_or(|before| limit < before));
        let plan = asked.plan_again(layout, &self.engine.coming_plan(), self.pace().as_ref(), lower)?;
        let most = limit.unwrap_or_else(|| plan.physical_bytes());
        let (done, promised) = match &self.place {
            Some(place) => {
                let most = place.most_of(&plan, limit, layout);
                (place.rebudget(plan, most), place.bytes(most))
            }
            None => (self.engine.rebudget(plan, most).map_err(Into::into), most),
        };
        if done.is_ok() || self.engine.coming_limit() == promised {
            request.limit = limit;
        }
        done.map_err(|error| self.renamed(error))
    }

    /// The device's memory as it would be if the model were not on it.
    fn memory_without_this(&self) -> Result<MemoryInfo> {
        let memory = self.driver.memory_info()?;
        let own = if self.is_here() { self.plan().physical_bytes() } else { Bytes::ZERO };
        Ok(MemoryInfo { free: Bytes((memory.free + own).0.min(memory.total.0)), ..memory })
    }
}
