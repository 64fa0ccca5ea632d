//! Another budget for a model that runs: between its steps, and less of it in the middle of one.
#![forbid(unsafe_code)]

use std::sync::{MutexGuard, PoisonError};

use gpu_driver::{Bytes, MemoryInfo};

use crate::budget::Budget;
use crate::error::Result;
use crate::offloader::Offloader;
use crate::planned::most_pages;
use crate::request::Request;

impl Offloader {
    /// The device memory that the weights may take, resolved to bytes, and what is preloaded with it; `None` is without limit.
    pub fn budget(&self) -> Option<Bytes> {
        self.request().limit
    }

    /// What of [`budget`](Self::budget) is preloaded: beyond the budget that was set, and given back under pressure.
    pub fn preloaded(&self) -> Bytes {
        let Request { limit, floor, .. } = self.request();
        limit.zip(floor).map_or(Bytes::ZERO, |(limit, floor)| limit - floor)
    }

    /// Changes the device memory that the weights may take, between steps; units and addresses stay, nothing is preloaded any
    /// more. A higher budget copies what becomes resident, a lower one copies nothing. Blocks until the model's work has
    /// run. An open budget counts what the model has on the device as free.
    ///
    /// Of models that share a device, those that ran longest ago leave if a higher budget needs their room, or the model itself
    /// if the others ran since. A model that is away takes its new budget when it comes.
    ///
    /// # Errors
    /// A budget that cannot be one or is below the model's minimum, which the error names, or that what never leaves a shared
    /// device has no room for; a step under way or a held unit: nothing was changed. If the driver fails, a higher budget
    /// is as if it had not been asked for, and a lower one is made true by the next step; [`budget`](Self::budget) says which.
    pub fn set_budget(&self, budget: Budget) -> Result<()> {
        let mut request = self.lock_request();
        let limit = budget.resolve(self.memory_without_this()?)?;
        let asked = Request { limit, floor: limit, ..*request };
        asked.check(self.engine.layout())?;
        self.change(&mut request, asked, false)
    }

    /// Lets the weights take `limit`, of which what is beyond the budget that was set is preloaded; never less than that. As
    /// [`set_budget`](Self::set_budget) otherwise.
    ///
    /// # Errors
    /// As [`set_budget`](Self::set_budget).
    pub fn preload(&self, limit: Bytes) -> Result<()> {
        let mut request = self.lock_request();
        let Some(floor) = request.floor else { return Ok(()) };
        let asked = Request { limit: Some(limit.max(floor)), ..*request };
        self.change(&mut request, asked, false)
    }

    /// Gives back at least so many bytes of what is preloaded, or all of it, also in the middle of a step of this thread: the
    /// step goes on with the same bits. Gives the bytes that are free now. Blocks until the model's work has run.
    ///
    /// # Errors
    /// If another thread is in the middle of a step, the stream is being captured, or units in use would not be together in
    /// less: nothing was changed. If the driver fails in a step, that step is over, and its end is an error.
    pub fn release_preload(&self, bytes: Bytes) -> Result<Bytes> {
        let mut request = self.lock_request();
        let (Some(limit), Some(floor)) = (request.limit, request.floor) else { return Ok(Bytes::ZERO) };
        let granule = self.engine.layout().granule();
        let held = self.engine.coming_plan().physical_bytes();
        let wanted = bytes.checked_round_up(granule).unwrap_or(held);
        let least = limit.min((held - wanted).max(floor));
        if bytes == Bytes::ZERO || least >= held {
            request.limit = Some(limit.min(held).max(floor));
            return Ok(Bytes::ZERO);
        }
        let asked = Request { limit: Some(least), ..*request };
        self.change(&mut request, asked, true)?;
        Ok(held - self.engine.coming_plan().physical_bytes())
    }

    fn change(&self, request: &mut Request, asked: Request, at_once: bool) -> Result<()> {
        if asked.limit == request.limit {
            *request = asked;
            return Ok(());
        }
        let (limit, layout) = (asked.limit, self.engine.layout());
        let lower = limit.is_some_and(|limit| request.limit.is_none_or(|before| limit < before));
        let plan = asked.plan_again(layout, &self.engine.coming_plan(), self.pace().as_ref(), lower)?;
        let most = limit.unwrap_or_else(|| plan.physical_bytes());
        let (done, promised) = match &self.place {
            Some(place) => {
                let most = most_pages(&plan, limit, layout);
                let done = if at_once { place.shrink(plan, most) } else { place.rebudget(plan, most) };
                (done, place.bytes(most))
            }
            None if at_once => (self.engine.shrink(plan, most).map_err(Into::into), most),
            None => (self.engine.rebudget(plan, most).map_err(Into::into), most),
        };
        if done.is_ok() || self.engine.coming_limit() == promised {
            *request = asked;
        }
        done.map_err(|error| self.renamed(error))
    }

    fn lock_request(&self) -> MutexGuard<'_, Request> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device's memory as it would be if the model were not on it.
    fn memory_without_this(&self) -> Result<MemoryInfo> {
        let memory = self.driver.memory_info()?;
        let own = if self.is_here() { self.plan().physical_bytes() } else { Bytes::ZERO };
        Ok(MemoryInfo { free: Bytes((memory.free + own).0.min(memory.total.0)), ..memory })
    }
}
