//! What the models of one device have in common: the pages of the transit ring, and the page that absent models read.
//!
//! Only the model that runs uses the ring; whoever lets another one run has waited for the first. A model that left the
//! device keeps its addresses: those of its own pages read 0xFF, those of the ring go on reading the ring, so that coming
//! back maps again only what was taken away.
#![forbid(unsafe_code)]

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_driver::{Bytes, Driver, PageHandle};
use vmm_alloc::{Page, PagePool, poison_page};

use super::error::Result;

/// Pages of the ring and of poison that all engines made with it share. Every engine's layout must have its granule.
#[derive(Debug)]
pub struct SharedPages {
    pool: PagePool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    ring: Vec<Arc<Page>>,
    /// How many of the ring's first pages are mapped by models other than the one whose plan is being replaced.
    floor: usize,
    poison: Option<Arc<Page>>,
}

impl SharedPages {
    /// A ring without pages, which come from `pool`, as those of all the engines do.
    pub fn new(pool: PagePool) -> Arc<Self> {
        Arc::new(Self { pool, state: Mutex::default() })
    }

    /// The pool.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// How many pages the ring has.
    pub fn ring_pages(&self) -> u32 {
        self.lock().ring.len() as u32
    }

    /// Says how many of the ring's first pages other models than the one that is about to change use: a smaller ring of
    /// that one gives up the others.
    pub fn set_floor(&self, pages: u32) {
        self.lock().floor = pages as usize;
    }

    /// Takes pages off the ring's end, down to so many. Engines that have them mapped are away, and are made to give them up
    /// before long: each of them [owes](crate::Engine::owes) them until then.
    pub fn trim(&self, pages: u32) -> Vec<Arc<Page>> {
        let mut state = self.lock();
        let keep = (pages as usize).min(state.ring.len());
        state.ring.split_off(keep)
    }

    /// As [`trim`](Self::trim), but leaves what other models use.
    pub(super) fn trim_to_floor(&self, pages: usize) -> Vec<Arc<Page>> {
        let mut state = self.lock();
        let keep = pages.max(state.floor).min(state.ring.len());
        state.ring.split_off(keep)
    }

    /// Whether the ring's first pages are these.
    pub(super) fn begins_with(&self, pages: &[Arc<Page>]) -> bool {
        let state = self.lock();
        pages.len() <= state.ring.len()
            && pages.iter().zip(&state.ring).all(|(one, other)| Arc::ptr_eq(one, other))
    }

    /// The ring's first pages, at most so many.
    pub(super) fn ring(&self, pages: usize) -> Vec<Arc<Page>> {
        self.lock().ring.iter().take(pages).cloned().collect()
    }

    /// Puts a page at the ring's end.
    pub(super) fn extend(&self, page: Arc<Page>) {
        self.lock().ring.push(page);
    }

    /// The page that absent models read, of memory that the pool's limit does not count. Blocks the first time.
    pub(super) fn poison(&self) -> Result<Arc<Page>> {
        let mut state = self.lock();
        if let Some(page) = &state.poison {
            return Ok(Arc::clone(page));
        }
        let driver: Arc<dyn Driver> = Arc::clone(self.pool.driver());
        let granule: Bytes = self.pool.granule();
        let page = poison_page(&PagePool::new(driver, granule, granule)?)?;
        Ok(Arc::clone(state.poison.insert(page)))
    }

    /// The poison page's handle, if there is one yet.
    pub(super) fn poison_handle(&self) -> Option<PageHandle> {
        self.lock().poison.as_ref().map(|page| page.handle())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is one step, so that what a panic elsewhere leaves is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
