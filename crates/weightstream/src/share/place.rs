//! A model's place among those of its device: running, other plans, other budgets, leaving.
#![forbid(unsafe_code)]

use gpu_driver::{Bytes, StreamHandle};
use offload_core::{Engine, EngineError, Plan, TenantId};

use super::{Share, State};
use crate::error::{Error, Result};

/// What changes with a model's plan.
#[derive(Debug, Clone, Copy)]
enum Change {
    /// Nothing else.
    Plan,
    /// The most pages it may take.
    Most(u32),
    /// That, downwards, also in the middle of its step.
    Less(u32),
}

/// A model's place in a share, until it is dropped.
#[derive(Debug)]
pub(crate) struct Place {
    share: Share,
    id: TenantId,
}

impl Place {
    /// The place of a model that has joined.
    pub(super) fn new(share: Share, id: TenantId) -> Self {
        Self { share, id }
    }

    /// Brings the model, and does what makes it run before anybody can send it away again.
    pub(crate) fn running(
        &self,
        stream: StreamHandle,
        call: impl FnOnce() -> Result<(), EngineError>,
    ) -> Result<()> {
        let mut state = self.share.lock();
        self.share.bring(&mut state, self.id, stream)?;
        Ok(call()?)
    }

    /// Another plan of the model, which takes other parts of what it may.
    pub(crate) fn replan(&self, plan: Plan) -> Result<()> {
        let mut state = self.share.lock();
        let engine = state.open(self.id)?;
        self.put(&mut state, &engine, plan, Change::Plan)
    }

    /// The bytes of so many pages.
    pub(crate) fn bytes(&self, pages: u32) -> Bytes {
        self.share.bytes(pages)
    }

    /// The model may take `most` pages from now on, and takes them by this plan. Others leave if they have to, or it does.
    pub(crate) fn rebudget(&self, plan: Plan, most: u32) -> Result<()> {
        let mut state = self.share.lock();
        let engine = state.open(self.id)?;
        engine.check_between("another budget")?;
        let busy = state.busy(self.id);
        let room = state.tenancy.make_room(self.id, most, &busy);
        let leave = room.map_err(|crowded| self.share.crowded(&state, self.id, &crowded))?;
        if engine.is_here()
            && plan.ring_granules > 0
            && let Some(&user) = busy.iter().find(|user| state.ring_user == Some(**user))
        {
            // It needs the ring while its plan is replaced.
            return Err(Error::Busy { model: state.name(self.id), other: state.name(user) });
        }
        for other in leave {
            state.forget(other);
            if let Some(engine) = state.engine(other) {
                drop(engine.vacate(self.share.inner.pages.ring_pages())?);
            }
            state.tenancy.left(other);
        }
        let done = self.put(&mut state, &engine, plan, Change::Most(most));
        // What a lower budget leaves over goes now, what a higher one did not get is not allowed any more.
        self.share.settle_later(&state);
        done
    }

    /// The model takes less from now on, also in the middle of its step.
    pub(crate) fn shrink(&self, plan: Plan, most: u32) -> Result<()> {
        let mut state = self.share.lock();
        let engine = state.open(self.id)?;
        let done = self.put(&mut state, &engine, plan, Change::Less(most));
        self.share.settle_later(&state);
        done
    }

    /// Puts another plan in place, and the most it is made for if that changes.
    fn put(&self, state: &mut State, engine: &Engine, plan: Plan, change: Change) -> Result<()> {
        let Some(before) = state.tenancy.tenant(self.id).cloned() else {
            return Err(EngineError::Closed.into());
        };
        let most = match change {
            Change::Plan => None,
            Change::Most(most) | Change::Less(most) => Some(most),
        };
        if engine.is_here() && (!engine.is_busy() || matches!(change, Change::Less(_))) {
            // While pages change their purpose none may be kept for models that are away.
            let floor = state.tenancy.ring_needed(Some(self.id));
            self.share.trim(state, floor.max(before.ring))?;
            let kept = floor.max(plan.ring_granules.min(before.ring));
            state.absent().try_for_each(|other| other.vacate(kept).map(drop))?;
            self.share.inner.pages.set_floor(floor);
            if plan.ring_granules > 0 {
                // What the ring holds of another model may be overwritten.
                Share::take_ring(state, self.id)?;
            }
        }
        let (own, ring, allowed) = (plan.own_granules, plan.ring_granules, state.tenancy.most());
        state.tenancy.rebudget(self.id, own, ring, most.unwrap_or(before.most));
        let done = match most {
            None => engine.replan(plan),
            Some(most) => {
                // Until a smaller plan is in place, the pages of the one before are held.
                self.share.pool().set_limit(self.share.bytes(allowed.max(state.tenancy.most())));
                let limit = self.share.bytes(most);
                if matches!(change, Change::Less(_)) {
                    engine.shrink(plan, limit)
                } else {
                    engine.rebudget(plan, limit)
                }
            }
        };
        let refused = matches!(
            done,
            Err(EngineError::InStep { .. }
                | EngineError::Held { .. }
                | EngineError::OtherThread
                | EngineError::ForeignPlan { .. }
                | EngineError::PageLimit { .. }
                | EngineError::Closed)
        );
        let is_promised = most.is_none_or(|most| engine.coming_limit() == self.share.bytes(most));
        if refused || !is_promised {
            // The plan is the one before, or will be.
            state.tenancy.rebudget(self.id, before.own, before.ring, before.most);
        }
        Ok(done?)
    }

    /// Takes the model off the device until it runs again.
    pub(crate) fn vacate(&self) -> Result<()> {
        let mut state = self.share.lock();
        let Some(engine) = state.engine(self.id) else { return Ok(()) };
        if !engine.is_here() && !state.tenancy.here().any(|id| id == self.id) {
            return Ok(());
        }
        state.forget(self.id);
        drop(engine.vacate(self.share.inner.pages.ring_pages())?);
        state.tenancy.left(self.id);
        self.share.settle(&state)
    }

    /// The model was closed, or is going to be dropped.
    pub(crate) fn part(&self) {
        let mut state = self.share.lock();
        if state.engines.remove(&self.id).is_none() {
            return;
        }
        state.tenancy.part(self.id);
        if state.ring_user == Some(self.id) {
            state.ring_user = None;
        }
        state.forget(self.id);
        self.share.settle_later(&state);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.part();
    }
}
