//! The pages behind a model's addresses, brought from whatever they are to what a plan wants.
//!
//! ```text
//!   plan A   | own | own | R0  R1  R2 | own | R0  R1 …        what changes is unmapped first, its pages are spare;
//!   plan B   | own | R0  | R1  own R0 | own | own R1 …        spare pages are mapped before new ones are taken
//! ```
//!
//! [`Memory::reach`] reads what is mapped rather than what should be, so that it can be called again after it failed
//! half way, and the first plan is reached like any other. It does not wait for the device: its caller has.
//!
//! Where models share a device, the ring's pages are theirs together, and [`Memory::leave`] gives the own pages of a model
//! that is not needed now to others; its addresses then alias a page of poison until the model comes back.
//!
//! **Invariants.** No page is taken while a spare one is left, so the pages held never exceed what the larger of
//! the two plans needs. An own page keeps its bytes as long as its granule stays resident.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Access, Bytes, PageHandle};
use vmm_alloc::{AddressSpace, Page, PagePool};

use super::error::Result;
use super::shared::SharedPages;
use crate::plan::{Backing, Plan};

/// Addresses, and the pages behind them by purpose.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) space: Arc<AddressSpace>,
    pub(super) pool: PagePool,
    /// If other models are on the device; `ring` is then the part of theirs that this one has mapped.
    shared: Option<Arc<SharedPages>>,
    ring: Vec<Arc<Page>>,
    /// Mapped nowhere, kept between a failure and the call that makes it good.
    spare: Vec<Arc<Page>>,
    /// Whether a granule's own page holds the model's bytes.
    filled: Vec<bool>,
    /// Whether the own pages are others' already although they are still mapped here: see [`Memory::lend`].
    lent: bool,
    /// Whether a call failed since access was last set as a whole.
    unsure: bool,
    /// A mistake made on purpose: pages that are not needed any more are kept.
    #[cfg(test)]
    pub(super) keeps_spare: bool,
}

impl Memory {
    pub(super) fn new(space: Arc<AddressSpace>, pool: PagePool, shared: Option<Arc<SharedPages>>) -> Self {
        let filled = vec![false; space.granules() as usize];
        Self {
            space,
            pool,
            shared,
            ring: Vec::new(),
            spare: Vec::new(),
            filled,
            lent: false,
            unsure: false,
            #[cfg(test)]
            keeps_spare: false,
        }
    }

    /// Maps what `plan` wants. The device is idle on everything that is mapped now.
    pub(super) fn reach(&mut self, plan: &Plan) -> Result<()> {
        let reached = self.map_all(plan);
        if reached.is_err() && self.shared.is_some() {
            self.spare.clear(); // Others may need them, and those that are missing next time are within the limit.
        }
        reached
    }

    fn map_all(&mut self, plan: &Plan) -> Result<()> {
        if self.lent {
            let given = std::mem::take(&mut self.spare);
            self.leave(self.ring.len())?; // What is mapped is not what is filled.
            self.spare = given;
        }
        let unsure = std::mem::replace(&mut self.unsure, true);
        let ring_pages = plan.ring_granules as usize;
        self.follow_ring()?;
        let changed = self.changed(plan);
        self.vacate(&changed, ring_pages)?;
        self.stock(plan, &changed, ring_pages)?;
        self.map(plan, &changed)?;
        if let Some(page) = self.space.page(0) {
            self.space.set_tail(&page)?;
        }
        if unsure {
            // A failure may have left granules mapped but shut.
            self.space.set_access(0, self.space.granules(), Access::ReadWrite)?;
        }
        #[cfg(test)]
        let gives_back = !self.keeps_spare;
        #[cfg(not(test))]
        let gives_back = true;
        if gives_back {
            self.spare.clear();
        }
        self.unsure = false;
        Ok(())
    }

    /// The granules whose page is not the one that `plan` wants.
    fn changed(&self, plan: &Plan) -> Vec<bool> {
        let ring: HashMap<PageHandle, u32> =
            (0..).zip(&self.ring).map(|(i, page)| (page.handle(), i)).collect();
        let poison = self.poison_handle();
        let kept = |granule: u32, want: &Backing| {
            let is = self.space.page(granule).filter(|page| Some(page.handle()) != poison);
            let is = is.map(|page| ring.get(&page.handle()).copied());
            match (is, *want) {
                (Some(None), Backing::Own) => true,
                (Some(Some(is)), Backing::Ring(want)) => is == want && want < plan.ring_granules,
                _ => false,
            }
        };
        (0..).zip(&plan.backing).map(|(granule, want)| !kept(granule, want)).collect()
    }

    /// Unmaps what changes and keeps its pages as spare ones.
    fn vacate(&mut self, changed: &[bool], ring_pages: usize) -> Result<()> {
        let others = self.others();
        for run in runs(changed) {
            let own: Vec<_> = run
                .clone()
                .filter_map(|granule| self.space.page(granule))
                .filter(|page| !others.contains(&page.handle()))
                .collect();
            self.space.unmap(run.start, run.end - run.start)?;
            self.spare.extend(own);
            self.filled[run.start as usize..run.end as usize].fill(false);
        }
        if self.ring.len() > ring_pages {
            // Nothing is mapped to these any more: each of their granules has changed.
            let given_up = self.ring.split_off(ring_pages);
            // Pages of a shared ring are spare only if no other model has them mapped.
            self.spare.extend(match &self.shared {
                Some(shared) => shared.trim_to_floor(ring_pages),
                None => given_up,
            });
        }
        Ok(())
    }

    /// Has a page ready for everything that is to be mapped: spare ones first, then new ones.
    fn stock(&mut self, plan: &Plan, changed: &[bool], ring_pages: usize) -> Result<()> {
        let own =
            plan.backing.iter().zip(changed).filter(|(want, changed)| **changed && **want == Backing::Own);
        if let Some(shared) = &self.shared {
            self.ring = shared.ring(ring_pages);
        }
        let needed = own.count() + ring_pages - self.ring.len();
        let missing = needed.saturating_sub(self.spare.len());
        if missing > 0 {
            self.spare.extend(self.pool.take(missing)?);
        }
        while self.ring.len() < ring_pages
            && let Some(page) = self.spare.pop()
        {
            if let Some(shared) = &self.shared {
                shared.extend(Arc::clone(&page));
            }
            self.ring.push(page);
        }
        Ok(())
    }

    fn map(&mut self, plan: &Plan, changed: &[bool]) -> Result<()> {
        for run in runs(changed) {
            let wants = &plan.backing[run.start as usize..run.end as usize];
            let pages: Vec<_> = wants
                .iter()
                .filter_map(|want| match *want {
                    Backing::Own => self.spare.pop(),
                    Backing::Ring(page) => self.ring.get(page as usize).cloned(),
                })
                .collect();
            if let Err(error) = self.space.map(run.start, &pages) {
                let shared =
                    pages.iter().filter(|page| !self.ring.iter().any(|ring| Arc::ptr_eq(page, ring)));
                self.spare.extend(shared.cloned());
                // What is mapped all the same is found as such the next time, and must not be mapped twice.
                let space = &self.space;
                let mapped = |page: &Arc<Page>| {
                    run.clone().any(|granule| space.page(granule).is_some_and(|is| Arc::ptr_eq(page, &is)))
                };
                self.spare.retain(|page| !mapped(page));
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Gives the own pages, for whoever comes next, and leaves them mapped here too: [`leave`](Self::leave) takes them away, which
    /// it can do while others' bytes are copied to them. What is mapped has been waited for.
    pub(super) fn lend(&mut self) -> Vec<Arc<Page>> {
        if self.shared.is_none() || self.lent {
            return Vec::new();
        }
        let others = self.others();
        let mapped = (0..self.space.granules()).filter_map(|granule| self.space.page(granule));
        let own = mapped.filter(|page| !others.contains(&page.handle()));
        self.lent = true;
        std::mem::take(&mut self.spare).into_iter().chain(own).collect()
    }

    /// Whether the own pages are others' already and still mapped here.
    pub(super) fn is_lent(&self) -> bool {
        self.lent
    }

    /// Whether pages are mapped here that are others' already: own ones, or such that the shared ring had.
    pub(super) fn owes(&self) -> bool {
        let stale = |shared: &Arc<SharedPages>| !shared.begins_with(&self.ring);
        self.lent || self.shared.as_ref().is_some_and(stale)
    }

    /// Gives up the own pages, and lets their addresses read poison; those of the ring's first `keep` pages go on reading
    /// these. What is mapped has been waited for. Gives the pages that were not [lent](Self::lend), for whoever comes next. Can be
    /// called again after it failed, and with a smaller `keep`.
    pub(super) fn leave(&mut self, keep: usize) -> Result<Vec<Arc<Page>>> {
        let Some(shared) = self.shared.clone() else { return Ok(Vec::new()) };
        let poison = shared.poison()?;
        self.unsure = true;
        self.space.set_tail(&poison)?; // First, or it keeps a page that is no granule's any more.
        let kept: Vec<PageHandle> =
            self.ring.iter().take(keep).chain([&poison]).map(|page| page.handle()).collect();
        let ring: Vec<PageHandle> = self.ring.iter().map(|page| page.handle()).collect();
        let gone = |granule| self.space.page(granule).is_none_or(|page| !kept.contains(&page.handle()));
        let gone: Vec<bool> = (0..self.space.granules()).map(gone).collect();
        let mut given = std::mem::take(&mut self.spare);
        for run in runs(&gone) {
            let own = run.clone().filter_map(|granule| self.space.page(granule));
            let own: Vec<_> = own.filter(|page| !ring.contains(&page.handle())).collect();
            self.filled[run.start as usize..run.end as usize].fill(false);
            self.space.remap(run.start, &vec![Arc::clone(&poison); run.len()])?;
            given.extend(own);
        }
        self.ring.truncate(keep);
        self.unsure = false;
        if std::mem::take(&mut self.lent) {
            given.clear();
        }
        Ok(given)
    }

    /// Takes pages that others gave up, to be used before new ones are made.
    pub(super) fn take_over(&mut self, pages: Vec<Arc<Page>>) {
        self.spare.extend(pages);
    }

    /// Whether the pool's pages and the ring are shared with other models.
    pub(super) fn shared(&self) -> Option<&Arc<SharedPages>> {
        self.shared.as_ref()
    }

    /// Lets go of ring pages that are not the shared ring's any more: a failure kept this model from doing so in time.
    fn follow_ring(&mut self) -> Result<()> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let now = shared.ring(self.ring.len());
        let same = self.ring.iter().zip(&now).take_while(|(is, now)| Arc::ptr_eq(is, now)).count();
        if same < self.ring.len() {
            let stale: Vec<PageHandle> = self.ring[same..].iter().map(|page| page.handle()).collect();
            let is_stale =
                |granule| self.space.page(granule).is_some_and(|page| stale.contains(&page.handle()));
            let flags: Vec<bool> = (0..self.space.granules()).map(is_stale).collect();
            for run in runs(&flags) {
                self.space.unmap(run.start, run.end - run.start)?;
            }
            self.ring.truncate(same);
        }
        Ok(())
    }

    /// The mapped pages that are not the model's own: those of the ring, and the one of poison.
    fn others(&self) -> Vec<PageHandle> {
        self.ring.iter().map(|page| page.handle()).chain(self.poison_handle()).collect()
    }

    fn poison_handle(&self) -> Option<PageHandle> {
        self.shared.as_ref().and_then(|shared| shared.poison_handle())
    }

    /// Runs of resident granules that do not hold the model's bytes yet.
    pub(super) fn unfilled(&self, plan: &Plan) -> Vec<Range<u32>> {
        let empty: Vec<bool> = plan
            .backing
            .iter()
            .zip(&self.filled)
            .map(|(want, filled)| *want == Backing::Own && !filled)
            .collect();
        runs(&empty)
    }

    /// Notes that every resident granule holds the model's bytes.
    pub(super) fn note_filled(&mut self, plan: &Plan) {
        for (filled, want) in self.filled.iter_mut().zip(&plan.backing) {
            *filled = *want == Backing::Own;
        }
    }

    /// Gives up the pages held besides the mappings, before the range is retired.
    pub(super) fn let_go(&mut self) {
        self.ring.clear();
        self.spare.clear();
    }

    /// The bytes of a run of granules.
    pub(super) fn bytes_of(&self, run: &Range<u32>) -> Range<u64> {
        let Bytes(granule) = self.space.granule();
        u64::from(run.start) * granule..u64::from(run.end) * granule
    }

    /// Opens every granule: the guard mode's state where all units are present.
    pub(super) fn open_all(&self) -> Result<()> {
        Ok(self.space.set_access(0, self.space.granules(), Access::ReadWrite)?)
    }

    /// Shuts or opens the granules that lie wholly inside `bytes`. What uses them has been waited for.
    pub(super) fn guard(&self, bytes: &Range<u64>, access: Access) -> Result<()> {
        let Bytes(granule) = self.space.granule();
        let (first, end) = ((bytes.start.div_ceil(granule)) as u32, (bytes.end / granule) as u32);
        if first < end {
            self.space.set_access(first, end - first, access)?;
        }
        Ok(())
    }
}

/// The maximal runs of set flags.
fn runs(flags: &[bool]) -> Vec<Range<u32>> {
    let mut runs: Vec<Range<u32>> = Vec::new();
    for (granule, _) in (0..).zip(flags).filter(|(_, flag)| **flag) {
        match runs.last_mut() {
            Some(run) if run.end == granule => run.end += 1,
            _ => runs.push(granule..granule + 1),
        }
    }
    runs
}
