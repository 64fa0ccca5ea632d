//! Which models of one device stay when another one runs, and how large their common ring is: pure decisions.
//!
//! A model that runs needs its own pages and the ring. Models that it tolerates stay; the others leave. Where not all that
//! may stay fit beside it, those that ran longest ago leave too. Numbers are pages of one size.
//!
//! ```text
//!   runs: B       | own pages of B | own pages of A, which B tolerates | ring: what the larger of both needs |
//!                 └───────────── at most what A and B may take together ──────────────┘
//! ```
//!
//! **Invariants.** A decision changes nothing until it is noted as done. What is here never takes more than the sum of what
//! each of them may take, and that sum never more than the limit.
#![forbid(unsafe_code)]

#[cfg(test)]
mod tests;

use std::collections::BTreeSet;

/// A model, for as long as it shares the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantId(pub u32);

/// Whom a model accepts beside it while it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Company {
    /// The models of these names. Says nothing of whether they accept it.
    Of(BTreeSet<String>),
    /// It accepts every model, every model accepts it, and it never leaves for one.
    Everyone,
}

impl Default for Company {
    /// Nobody.
    fn default() -> Self {
        Self::Of(BTreeSet::new())
    }
}

/// A model as decisions see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// Its name, which others' [`Company`] may have.
    pub name: String,
    /// Pages of its own that its plan wants.
    pub own: u32,
    /// Pages of the ring that its plan uses.
    pub ring: u32,
    /// The most pages that any plan of it takes, ring included.
    pub most: u32,
    /// The pages of its budget: more than `most` if the whole model takes less.
    pub allowed: u32,
    /// Whom it accepts.
    pub company: Company,
}

/// What has to happen before a model runs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Switch {
    /// The models that leave, in the order of their numbers.
    pub leave: Vec<TenantId>,
    /// The pages that the ring keeps or grows to: absent models that have more of it mapped give that up.
    pub ring: u32,
    /// The most pages that may be held from then on.
    pub most: u32,
}

/// A model cannot run: what never leaves takes too much.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Crowded {
    /// The most pages it may take.
    pub needed: u32,
    /// Those of the models that do not leave for it, by name.
    pub staying: Vec<String>,
    /// Their pages.
    pub taken: u32,
    /// The limit.
    pub limit: u32,
}

/// The models of one device.
#[derive(Debug, Clone, Default)]
pub struct Tenancy {
    limit: u32,
    tenants: Vec<Option<Place>>,
    /// Counts what ran.
    clock: u64,
}

#[derive(Debug, Clone)]
struct Place {
    tenant: Tenant,
    here: bool,
    /// When it ran last.
    ran: u64,
}

impl Tenancy {
    /// No models yet, and a limit in pages.
    pub fn new(limit: u32) -> Self {
        Self { limit, ..Self::default() }
    }

    /// A model joins, not here yet.
    pub fn join(&mut self, tenant: Tenant) -> TenantId {
        let place = Some(Place { tenant, here: false, ran: 0 });
        // Numbers are not given again, so that one kept too long names nobody.
        self.tenants.push(place);
        TenantId(self.tenants.len() as u32 - 1)
    }

    /// A model is gone for good.
    pub fn part(&mut self, id: TenantId) {
        if let Some(place) = self.tenants.get_mut(id.0 as usize) {
            *place = None;
        }
    }

    /// A model's plan takes other parts of what it may.
    pub fn replan(&mut self, id: TenantId, own: u32, ring: u32) {
        if let Some(place) = self.place_mut(id) {
            (place.tenant.own, place.tenant.ring) = (own, ring);
        }
    }

    /// A model may take another number of pages, and its plan takes these parts of them.
    pub fn rebudget(&mut self, id: TenantId, own: u32, ring: u32, most: u32) {
        if let Some(place) = self.place_mut(id) {
            (place.tenant.own, place.tenant.ring) = (own, ring);
            if most != place.tenant.most {
                (place.tenant.most, place.tenant.allowed) = (most, most);
            }
        }
    }

    /// Who has to leave so that `id` may take `most` pages between its steps: models that ran before it did, the longest ago
    /// first; else itself, where those that ran since leave no room. Nobody if it is not here.
    ///
    /// # Errors
    /// If it would not fit beside those that never leave and those that `busy` says cannot; of one that is not here, if
    /// it would not fit alone.
    pub fn make_room(&self, id: TenantId, most: u32, busy: &[TenantId]) -> Result<Vec<TenantId>, Crowded> {
        let is_here = self.here().any(|here| here == id);
        let others: Vec<TenantId> = self.here().filter(|&other| other != id && is_here).collect();
        let (stay, mut may_leave): (Vec<TenantId>, Vec<TenantId>) =
            others.iter().partition(|&&other| self.never_leaves(other) || busy.contains(&other));
        let taken = |ids: &[TenantId]| self.sum(ids, |tenant| tenant.most);
        if taken(&stay).saturating_add(most) > self.limit {
            return Err(self.crowded(most, &stay));
        }
        let ran = |id: TenantId| self.place(id).map_or(0, |place| place.ran);
        may_leave.retain(|&other| self.never_leaves(id) || ran(other) < ran(id));
        may_leave.sort_by_key(|&other| ran(other));
        let (mut leave, mut sum) = (Vec::new(), taken(&others));
        let mut may_leave = may_leave.into_iter();
        while sum.saturating_add(most) > self.limit {
            let Some(other) = may_leave.next() else { return Ok(vec![id]) };
            sum -= taken(&[other]);
            leave.push(other);
        }
        leave.sort_unstable();
        Ok(leave)
    }

    /// What has to happen before `id` runs, where the ring has `ring` pages now. If the device is `roomy`, the ring stays as it is
    /// within the budgets of those that are here, for those that come back: making another one takes long.
    ///
    /// # Errors
    /// If what never leaves, and what `busy` says cannot, takes too much.
    pub fn switch(&self, id: TenantId, ring: u32, busy: &[TenantId], roomy: bool) -> Result<Switch, Crowded> {
        let Some(runs) = self.place(id) else { return Ok(Switch::default()) };
        let (mut stay, mut leave): (Vec<TenantId>, Vec<TenantId>) =
            self.here().filter(|&other| other != id).partition(|&other| self.accepts(id, other));
        let mut may_leave: Vec<TenantId> = Vec::new();
        stay.retain(|other| {
            let must = self.never_leaves(*other) || busy.contains(other);
            if !must {
                may_leave.push(*other);
            }
            must
        });
        let taken = |stay: &[TenantId]| self.sum(stay, |tenant| tenant.most);
        if taken(&stay).saturating_add(runs.tenant.most) > self.limit {
            return Err(self.crowded(runs.tenant.most, &stay));
        }
        // Those that ran last have the first choice of what is left.
        may_leave.sort_by_key(|other| std::cmp::Reverse(self.place(*other).map_or(0, |place| place.ran)));
        for other in may_leave {
            stay.push(other);
            if taken(&stay).saturating_add(runs.tenant.most) > self.limit {
                stay.pop();
                leave.push(other);
            }
        }
        leave.sort_unstable();
        stay.push(id);
        let (most, own) = (taken(&stay), self.sum(&stay, |tenant| tenant.own));
        let mut kept = self.ring_of(&stay, ring);
        if roomy {
            let allowed = self.sum(&stay, |tenant| tenant.allowed).min(self.limit);
            kept = kept.max(ring.min(allowed.saturating_sub(own)));
        }
        Ok(Switch { leave, ring: kept, most: most.max(own + kept) })
    }

    /// The ring of the models that are here, where it has `ring` pages now: as large as the one of them that needs most, and
    /// as it is where nobody lacks the pages, for those that come back.
    pub fn ring(&self, ring: u32) -> u32 {
        self.ring_of(&self.here().collect::<Vec<_>>(), ring)
    }

    /// The pages that the models here need of the ring, `except` one.
    pub fn ring_needed(&self, except: Option<TenantId>) -> u32 {
        self.here()
            .filter(|id| Some(*id) != except)
            .filter_map(|id| self.place(id))
            .map(ring)
            .max()
            .unwrap_or(0)
    }

    /// The most pages that the models here may take together.
    pub fn most(&self) -> u32 {
        self.sum(&self.here().collect::<Vec<_>>(), |tenant| tenant.most)
    }

    /// `id` comes, or runs again.
    pub fn came(&mut self, id: TenantId) {
        self.clock += 1;
        let now = self.clock;
        if let Some(place) = self.place_mut(id) {
            (place.here, place.ran) = (true, now);
        }
    }

    /// `id` left.
    pub fn left(&mut self, id: TenantId) {
        if let Some(place) = self.place_mut(id) {
            place.here = false;
        }
    }

    /// The models that are here.
    pub fn here(&self) -> impl Iterator<Item = TenantId> + '_ {
        self.ids(|place| place.here)
    }

    /// The models that are not.
    pub fn away(&self) -> impl Iterator<Item = TenantId> + '_ {
        self.ids(|place| !place.here)
    }

    /// A model.
    pub fn tenant(&self, id: TenantId) -> Option<&Tenant> {
        self.place(id).map(|place| &place.tenant)
    }

    /// Whether `other` may stay while `id` runs.
    fn accepts(&self, id: TenantId, other: TenantId) -> bool {
        let (Some(runs), Some(other)) = (self.place(id), self.place(other)) else { return false };
        match (&runs.tenant.company, &other.tenant.company) {
            (Company::Everyone, _) | (_, Company::Everyone) => true,
            (Company::Of(names), _) => names.contains(&other.tenant.name),
        }
    }

    fn crowded(&self, needed: u32, staying: &[TenantId]) -> Crowded {
        let names = staying.iter().filter_map(|other| self.place(*other));
        Crowded {
            needed,
            staying: names.map(|place| place.tenant.name.clone()).collect(),
            taken: self.sum(staying, |tenant| tenant.most),
            limit: self.limit,
        }
    }

    fn never_leaves(&self, id: TenantId) -> bool {
        self.place(id).is_some_and(|place| place.tenant.company == Company::Everyone)
    }

    fn ring_of(&self, here: &[TenantId], ring: u32) -> u32 {
        let needed = here.iter().filter_map(|id| self.place(*id)).map(self::ring).max().unwrap_or(0);
        let room = self.sum(here, |tenant| tenant.most) - self.sum(here, |tenant| tenant.own);
        needed.max(ring.min(room))
    }

    fn sum(&self, ids: &[TenantId], of: fn(&Tenant) -> u32) -> u32 {
        ids.iter()
            .filter_map(|id| self.place(*id))
            .fold(0, |sum: u32, place| sum.saturating_add(of(&place.tenant)))
    }

    fn ids(&self, test: fn(&Place) -> bool) -> impl Iterator<Item = TenantId> + '_ {
        let numbered = (0..).zip(&self.tenants);
        numbered.filter(move |(_, place)| place.as_ref().is_some_and(test)).map(|(id, _)| TenantId(id))
    }

    fn place(&self, id: TenantId) -> Option<&Place> {
        self.tenants.get(id.0 as usize).and_then(Option::as_ref)
    }

    fn place_mut(&mut self, id: TenantId) -> Option<&mut Place> {
        self.tenants.get_mut(id.0 as usize).and_then(Option::as_mut)
    }
}

fn ring(place: &Place) -> u32 {
    place.tenant.ring
}
