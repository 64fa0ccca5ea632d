//! Registering pages for a store: on its driver, within its limit, followed by its watch.

use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver, Registration};

use crate::claims::{Promise, Terms};
use crate::error::Result;
use crate::registered::{KeepAlive, Registered};
use crate::watch::{Watch, Work};

/// What every registration of a store has in common.
#[derive(Debug, Clone)]
pub(super) struct Registrar {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) limit: Option<Bytes>,
    pub(super) watch: Watch,
}

/// What is registered.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pages<'a> {
    /// Anonymous memory of somebody's.
    Memory,
    /// The slab's, for which the limit was promised.
    Slab(&'a Promise),
    /// A file's, mapped shared and read-only.
    File,
}

impl Registrar {
    /// Registers whole pages, unless the work was ended.
    ///
    /// # Safety
    /// As [`Registered::new`]; the pages are what `what` says.
    pub(super) unsafe fn register(
        &self,
        pages: Range<u64>,
        what: Pages<'_>,
        keep: Vec<KeepAlive>,
    ) -> Result<Registered> {
        self.watch.check()?;
        let (size, driver) = (Bytes(pages.end - pages.start), Arc::clone(&self.driver));
        let (registration, promise, is_file) = match what {
            Pages::Memory => (Registration::ReadWrite, None, false),
            Pages::Slab(promise) => (Registration::ReadWrite, Some(promise), false),
            Pages::File => (Registration::ReadOnly, None, true),
        };
        let terms = Terms { limit: self.limit, promise, is_file };
        // SAFETY: the caller's promise.
        let registered =
            unsafe { Registered::on_terms(driver, pages.start as *mut u8, size, registration, terms, keep) }?;
        self.watch.report(Work::Locked, size);
        Ok(registered)
    }
}
