//! Physical memory: pages of one granule each, made under a byte limit and given back when their last owner drops.
//!
//! Nothing is cached: an evicted page is worth having only if others can use its memory at once, and making one again
//! costs tens of microseconds, between steps. A page whose release the driver refuses keeps counting against the limit
//! (its memory is still held) and is tried again at the next take and release, and last when the pool is dropped.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_driver::{Bytes, Driver, DriverError, PageHandle};

use crate::error::{Result, VmmError};

/// Makes pages, never more than its limit allows. Clones share one pool; pages keep it alive.
#[derive(Clone)]
pub struct PagePool {
    inner: Arc<Inner>,
}

/// A moment's view of a [`PagePool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolReport {
    /// The most bytes the pool may hold.
    pub limit: Bytes,
    /// The size of one page.
    pub granule: Bytes,
    /// Physical bytes held now.
    pub in_use: Bytes,
    /// The most that were ever held at once.
    pub peak: Bytes,
    /// Pages made since the pool was made.
    pub created: u64,
    /// Takes that gave nothing: over the limit, or the driver had no memory.
    pub failed: u64,
    /// Pages whose release the driver refused and that will be tried again; they count as in use.
    pub stranded: u64,
}

/// One granule of physical memory. It is given back when the last `Arc` of it drops, which a mapping holds too.
pub struct Page {
    handle: PageHandle,
    inner: Arc<Inner>,
}

struct Inner {
    driver: Arc<dyn Driver>,
    granule: Bytes,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    limit: Bytes,
    in_use: Bytes,
    peak: Bytes,
    created: u64,
    failed: u64,
    stranded: Vec<PageHandle>,
}

impl PagePool {
    /// A pool of pages of `granule` bytes, a multiple of the device's granularity, that holds at most `limit` bytes.
    pub fn new(driver: Arc<dyn Driver>, granule: Bytes, limit: Bytes) -> Result<Self> {
        check_granule(&*driver, granule)?;
        let state = Mutex::new(State { limit, ..State::default() });
        Ok(Self { inner: Arc::new(Inner { driver, granule, state }) })
    }

    /// Makes `count` pages, or none. Their content is undefined.
    ///
    /// # Errors
    /// [`VmmError::Limit`] before the driver is asked, if they do not fit; the driver's refusal otherwise.
    pub fn take(&self, count: usize) -> Result<Vec<Arc<Page>>> {
        let mut state = self.inner.lock();
        self.inner.retry_stranded(&mut state);
        let asked = Bytes(self.inner.granule.0.saturating_mul(count as u64));
        if asked > state.limit - state.in_use {
            state.failed += 1;
            return Err(VmmError::Limit { asked, limit: state.limit, in_use: state.in_use });
        }
        let mut handles = Vec::with_capacity(count);
        for _ in 0..count {
            match self.inner.driver.create_pages(self.inner.granule) {
                Ok(handle) => {
                    handles.push(handle);
                    state.created += 1;
                    state.in_use = state.in_use + self.inner.granule;
                    state.peak = state.peak.max(state.in_use);
                }
                Err(cause) => {
                    state.failed += 1;
                    for handle in handles {
                        self.inner.give_back(&mut state, handle);
                    }
                    return Err(cause.into());
                }
            }
        }
        drop(state);
        Ok(handles
            .into_iter()
            .map(|handle| Arc::new(Page { handle, inner: Arc::clone(&self.inner) }))
            .collect())
    }

    /// The size of one page.
    pub fn granule(&self) -> Bytes {
        self.inner.granule
    }

    /// The driver that makes the pages.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.inner.driver
    }

    /// Changes the limit. Below what is in use, takes are refused until enough pages were dropped.
    pub fn set_limit(&self, limit: Bytes) {
        self.inner.lock().limit = limit;
    }

    /// Whether `driver` is the one that makes this pool's pages.
    pub(crate) fn is_of(&self, driver: &Arc<dyn Driver>) -> bool {
        self.inner.is_of(driver)
    }

    /// The pool in numbers.
    pub fn report(&self) -> PoolReport {
        let state = self.inner.lock();
        PoolReport {
            limit: state.limit,
            granule: self.inner.granule,
            in_use: state.in_use,
            peak: state.peak,
            created: state.created,
            failed: state.failed,
            stranded: state.stranded.len() as u64,
        }
    }
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.report().fmt(f)
    }
}

impl Page {
    /// The driver's name of this memory.
    pub fn handle(&self) -> PageHandle {
        self.handle
    }

    /// Its size.
    pub fn size(&self) -> Bytes {
        self.inner.granule
    }

    /// Whether `driver` is the one this page came from.
    pub(crate) fn is_of(&self, driver: &Arc<dyn Driver>) -> bool {
        self.inner.is_of(driver)
    }
}

impl fmt::Debug for Page {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Page")
            .field("handle", &self.handle)
            .field("size", &self.size())
            .finish_non_exhaustive()
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        self.inner.retry_stranded(&mut state);
        self.inner.give_back(&mut state, self.handle);
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The counters are updated in single steps, so that they are right even after a panic elsewhere.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_of(&self, driver: &Arc<dyn Driver>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(&self.driver), Arc::as_ptr(driver))
    }

    fn release(&self, handle: PageHandle) -> Result<(), DriverError> {
        // SAFETY: the handle came from `create_pages` of this driver; it is in exactly one place, a `Page` that is
        // being dropped, a failed take or the stranded list, and leaves it here when the release succeeds.
        unsafe { self.driver.release_pages(handle) }
    }

    /// Releases a page, or keeps it for a later try.
    fn give_back(&self, state: &mut State, handle: PageHandle) {
        match self.release(handle) {
            Ok(()) => state.in_use = state.in_use - self.granule,
            Err(cause) => {
                tracing::warn!(%cause, ?handle, "a page was not released; it is tried again later");
                state.stranded.push(handle);
            }
        }
    }

    fn retry_stranded(&self, state: &mut State) {
        for handle in std::mem::take(&mut state.stranded) {
            self.give_back(state, handle);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for handle in std::mem::take(&mut state.stranded) {
            if let Err(cause) = self.release(handle) {
                tracing::error!(%cause, ?handle, size = %self.granule, "a page was not released and is lost");
            }
        }
    }
}

/// Pages come in whole multiples of the device's granularity.
pub(crate) fn check_granule(driver: &dyn Driver, granule: Bytes) -> Result<()> {
    let granularity = driver.device_info().granularity;
    if granule == Bytes::ZERO || granule.checked_round_up(granularity) != Some(granule) {
        return Err(VmmError::Granule { granule, granularity });
    }
    Ok(())
}
