//! A device that several models share: one page pool, one transit ring, and who is on it.
//!
//! ```text
//!   A runs, then B   A's work is waited for ─ A's own pages go to B ─ B's missing bytes are copied, and meanwhile A's addresses
//!                    are made to read poison and the pages that B does not need are given back
//!   A accepted by B  A's own pages stay; only the ring changes hands
//! ```
//!
//! `offload_core::Tenancy` decides; this does it, under one lock, between steps. A switch that fails half way leaves models
//! whose next steps bring back what they lack.
#![forbid(unsafe_code)]

mod place;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use gpu_driver::{Bytes, Driver, StreamHandle};
use offload_core::{Crowded, Engine, EngineDesc, EngineError, SharedPages, Tenancy, Tenant, TenantId};
use serde::Serialize;
use vmm_alloc::PagePool;

use crate::error::{Error, Result};

pub(crate) use place::Place;

/// The largest pages of a shared device: 22 of 32 MiB are opened in 0.8 ms, 350 of 2 MiB in 14, and a switch opens all it takes.
const LARGEST: u64 = 32 << 20;
/// Into so many pages at least the largest model is cut, so that rounding takes little of it.
const FEWEST: u64 = 256;

/// A device of which this part is free keeps a ring that nobody here uses. A decoder's activations may need all of the rest; beside
/// this much a ring, which is a part of a budget, is little.
const ROOMY: (u64, u64) = (3, 4);

/// A device that models share. Clones are the same share.
#[derive(Debug, Clone)]
pub struct Share {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    pages: Arc<SharedPages>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    tenancy: Tenancy,
    engines: BTreeMap<TenantId, Weak<Engine>>,
    /// Whose bytes the ring may hold.
    ring_user: Option<TenantId>,
    /// Who ran last.
    last: Option<TenantId>,
}

/// A moment's view of a [`Share`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShareReport {
    /// Bytes of one page.
    pub page_bytes: u64,
    /// Bytes of pages held now.
    pub page_bytes_in_use: u64,
    /// The most that were ever held at once.
    pub page_bytes_peak: u64,
    /// Pages of the transit ring.
    pub ring_pages: u32,
    /// The models on the device, by name.
    pub here: Vec<String>,
}

impl Share {
    /// A device for models that together take at most `limit`, in pages of `granule`, a multiple of the device's granularity.
    ///
    /// # Errors
    /// A granule that the device cannot have.
    pub fn new(driver: Arc<dyn Driver>, granule: Bytes, limit: Bytes) -> Result<Self> {
        let pool = PagePool::new(driver, granule, Bytes::ZERO)?;
        let limit = u32::try_from(limit.0 / granule.0.max(1)).unwrap_or(u32::MAX);
        let state = State { tenancy: Tenancy::new(limit), ..State::default() };
        Ok(Self { inner: Arc::new(Inner { pages: SharedPages::new(pool), state: Mutex::new(state) }) })
    }

    /// The page size for models of which the largest has so many bytes, on a device of this granularity.
    pub fn granule_for(largest: Bytes, granularity: Bytes) -> Bytes {
        let mut granule = granularity.0.max(1);
        while granule.saturating_mul(2) <= LARGEST && largest.0 / (granule * 2) >= FEWEST {
            granule *= 2;
        }
        Bytes(granule)
    }

    /// The size of its pages.
    pub fn granule(&self) -> Bytes {
        self.pool().granule()
    }

    /// The share in numbers.
    pub fn report(&self) -> ShareReport {
        let (state, pool) = (self.lock(), self.pool().report());
        let name = |id| state.tenancy.tenant(id).map(|tenant| tenant.name.clone());
        ShareReport {
            page_bytes: pool.granule.0,
            page_bytes_in_use: pool.in_use.0,
            page_bytes_peak: pool.peak.0,
            ring_pages: self.inner.pages.ring_pages(),
            here: state.tenancy.here().filter_map(name).collect(),
        }
    }

    pub(crate) fn pool(&self) -> &PagePool {
        self.inner.pages.pool()
    }

    /// An engine of this share, which is not on the device yet.
    pub(crate) fn engine(&self, desc: EngineDesc, most: u32) -> Result<Engine, EngineError> {
        let most = Bytes(u64::from(most) * self.granule().0);
        Engine::sharing(desc, Arc::clone(&self.inner.pages), most)
    }

    /// A model takes its place.
    pub(crate) fn join(&self, tenant: Tenant, engine: &Arc<Engine>) -> Place {
        let mut state = self.lock();
        let id = state.tenancy.join(tenant);
        state.engines.insert(id, Arc::downgrade(engine));
        Place::new(self.clone(), id)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic leaves a switch half done, as an error does.
        self.inner.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has to happen before `id` runs.
    fn bring(&self, state: &mut State, id: TenantId, stream: StreamHandle) -> Result<()> {
        let engine = state.open(id)?;
        if state.last == Some(id) && engine.is_here() {
            return Ok(());
        }
        let pages = &self.inner.pages;
        let busy = state.busy(id);
        let switch = state.tenancy.switch(id, pages.ring_pages(), &busy, self.is_roomy());
        let switch = switch.map_err(|crowded| self.crowded(state, id, &crowded))?;
        let streams = state.tenancy.tenant(id).is_some_and(|tenant| tenant.ring > 0);
        let before = state.ring_user.filter(|&user| streams && user != id);
        let in_the_way = |other: &&TenantId| switch.leave.contains(other) || before == Some(**other);
        if let Some(&other) = busy.iter().find(in_the_way) {
            return Err(Error::Busy { model: state.name(id), other: state.name(other) });
        }
        if self.pool().driver().is_capturing(stream)? {
            return Err(EngineError::Capturing { stream }.into());
        }
        state.last = None;
        if !switch.leave.is_empty() {
            // Resident bytes of those that leave may be in use on the stream that their successor goes on with.
            self.pool().driver().synchronize_stream(stream)?;
        }
        // What a failure left undone holds pages that nobody has room beside.
        Self::clear(&state.owing(id), switch.ring)?;
        let mut given = Vec::new();
        for &other in &switch.leave {
            if let Some(engine) = state.engine(other) {
                given.extend(engine.lend()?);
            }
            state.tenancy.left(other);
        }
        // A lower budget that a failure left to the next step must not take the room of the one that runs now.
        let unfinished: Vec<TenantId> = state.tenancy.here().filter(|&other| other != id).collect();
        for other in unfinished {
            if let Some(engine) =
                state.engine(other).filter(|engine| engine.is_pending() && !engine.is_busy())
            {
                given.extend(engine.lend()?);
                state.tenancy.left(other);
            }
        }
        if streams {
            Self::take_ring(state, id)?;
        }
        given.extend(pages.trim(switch.ring)); // Absent models read them still, as they read what was lent: until `clear`.
        self.pool().set_limit(self.bytes(switch.most));
        pages.set_floor(u32::MAX); // Absent models have what it does not use of the ring.
        let owing = state.owing(id);
        // What it takes counts from here on, also if it does not get all of it.
        state.tenancy.came(id);
        let mut cleared = None;
        let clear = || Self::clear(&owing, switch.ring);
        let arrived = engine.arrive_during(given, stream, &mut || cleared = Some(clear()));
        cleared.unwrap_or_else(clear)?;
        arrived?;
        state.last = Some(id);
        Ok(())
    }

    /// Whether so much of the device is free that who runs does not miss what the ring of others keeps.
    fn is_roomy(&self) -> bool {
        let memory = self.pool().driver().memory_info();
        memory.is_ok_and(|memory| memory.free.0 >= memory.total.0 / ROOMY.1 * ROOMY.0)
    }

    /// Makes models that are away give up what they have mapped of others', but for the ring's first pages.
    fn clear(owing: &[Arc<Engine>], ring: u32) -> Result<(), EngineError> {
        owing.iter().try_for_each(|engine| engine.vacate(ring).map(drop))
    }

    /// Makes the ring no larger than so many pages: absent models give up what they have of it beyond. Gives its pages.
    fn trim(&self, state: &State, ring: u32) -> Result<Vec<Arc<vmm_alloc::Page>>> {
        if self.inner.pages.ring_pages() <= ring {
            return Ok(Vec::new());
        }
        state.absent().try_for_each(|engine| engine.vacate(ring).map(drop))?;
        Ok(self.inner.pages.trim(ring))
    }

    /// Makes the ring `id`'s: what another model has in it is not present any more.
    fn take_ring(state: &mut State, id: TenantId) -> Result<()> {
        let before = state.ring_user.filter(|&user| user != id);
        if let Some(user) = before.and_then(|user| state.engine(user)) {
            user.rest()?;
        }
        state.ring_user = Some(id);
        state.last = state.last.filter(|&last| last == id);
        Ok(())
    }

    /// Gives back what nobody needs since a model left.
    fn settle(&self, state: &State) -> Result<()> {
        let ring = state.tenancy.ring(self.inner.pages.ring_pages());
        self.trim(state, ring)?;
        self.pool().set_limit(self.bytes(state.tenancy.most()));
        Ok(())
    }

    /// The same where the call that it belongs to has done its work, or has an error of its own.
    fn settle_later(&self, state: &State) {
        if let Err(error) = self.settle(state) {
            tracing::warn!(%error, "pages of a shared ring are kept until the next switch");
        }
    }

    fn bytes(&self, pages: u32) -> Bytes {
        Bytes(u64::from(pages) * self.granule().0)
    }

    fn crowded(&self, state: &State, id: TenantId, crowded: &Crowded) -> Error {
        Error::Crowded {
            model: state.name(id),
            needed: self.bytes(crowded.needed),
            staying: crowded.staying.join(", "),
            taken: self.bytes(crowded.taken),
            limit: self.bytes(crowded.limit),
        }
    }
}

impl State {
    fn engine(&self, id: TenantId) -> Option<Arc<Engine>> {
        self.engines.get(&id).and_then(Weak::upgrade)
    }

    /// The engine of a model that was not closed.
    fn open(&self, id: TenantId) -> Result<Arc<Engine>, EngineError> {
        self.engine(id).ok_or(EngineError::Closed)
    }

    /// The models that are away.
    fn absent(&self) -> impl Iterator<Item = Arc<Engine>> + '_ {
        self.tenancy.away().filter_map(|id| self.engine(id))
    }

    /// The other models that are away and have pages mapped which are not theirs.
    fn owing(&self, id: TenantId) -> Vec<Arc<Engine>> {
        let others = self.tenancy.away().filter(|&other| other != id);
        others.filter_map(|other| self.engine(other)).filter(|engine| engine.owes()).collect()
    }

    /// A model does not count as the one that ran last any more.
    fn forget(&mut self, id: TenantId) {
        self.last = self.last.filter(|&last| last != id);
    }

    /// The other models that cannot leave now.
    fn busy(&self, id: TenantId) -> Vec<TenantId> {
        let is_busy = |other: &TenantId| self.engine(*other).is_some_and(|engine| engine.is_busy());
        self.tenancy.here().filter(|other| *other != id && is_busy(other)).collect()
    }

    fn name(&self, id: TenantId) -> String {
        self.tenancy.tenant(id).map(|tenant| tenant.name.clone()).unwrap_or_default()
    }
}
