//! Which pages of this process are registered through this crate, and how many more are promised. A page registered
//! twice fails in some drivers and counts double in others, so that every registration claims its pages here first,
//! whatever store it is for; and what is being copied in order to be registered holds a promise, so that no limit is
//! passed by two at once.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_driver::Bytes;

use crate::error::{HostError, Result};
use crate::ranges::Ranges;

/// What is claimed and promised.
#[derive(Debug)]
struct Table {
    /// Pages that are registered, or about to be.
    claimed: Option<Ranges>,
    /// Bytes among them that are pages of files.
    files: Bytes,
    /// Bytes that will be claimed.
    promised: Bytes,
}

// One table a process: pages are the process's, whoever registers them.
static TABLE: Mutex<Table> = Mutex::new(Table { claimed: None, files: Bytes::ZERO, promised: Bytes::ZERO });

fn lock() -> MutexGuard<'static, Table> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    fn claimed(&self) -> Bytes {
        Bytes(self.claimed.as_ref().map_or(0, Ranges::total))
    }

    /// Whether `more` fit beside what is claimed and promised.
    fn check(&self, more: Bytes, limit: Option<Bytes>) -> Result<()> {
        let registered = self.claimed() + self.promised;
        match limit {
            Some(limit) if more > Bytes::ZERO && registered + more > limit => {
                Err(HostError::RegisterLimit { asked: more, limit, registered })
            }
            _ => Ok(()),
        }
    }
}

/// How many bytes are page-locked through this crate now, in all stores of the process. Pages of a file that several
/// stores use count once.
pub fn registered_bytes() -> Bytes {
    lock().claimed()
}

/// How many of them are pages of files.
pub(crate) fn locked_file_bytes() -> Bytes {
    lock().files
}

/// Bytes that will be registered: nobody else gets their part of the limit while this lives.
#[derive(Debug, Default)]
pub(crate) struct Promise(Mutex<Bytes>);

impl Promise {
    /// Promises more, unless `limit` would be exceeded.
    pub(crate) fn add(&self, more: Bytes, limit: Option<Bytes>) -> Result<()> {
        let mut table = lock();
        table.check(more, limit)?;
        table.promised = table.promised + more;
        let mut own = self.own();
        *own = *own + more;
        Ok(())
    }

    /// Takes back up to `size` of what was promised, inside the table's lock.
    fn keep(&self, size: Bytes, table: &mut Table) {
        let mut own = self.own();
        let kept = size.min(*own);
        *own = *own - kept;
        table.promised = table.promised - kept;
    }

    fn own(&self) -> MutexGuard<'_, Bytes> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.keep(Bytes(u64::MAX), &mut lock());
    }
}

/// What is being claimed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Terms<'a> {
    /// The most that may be registered in this process.
    pub(crate) limit: Option<Bytes>,
    /// What was promised for it.
    pub(crate) promise: Option<&'a Promise>,
    /// Whether they are pages of a file.
    pub(crate) is_file: bool,
}

/// Pages that nobody else may register while this lives.
#[derive(Debug)]
pub(crate) struct Claim {
    pages: Range<u64>,
    is_file: bool,
}

impl Claim {
    /// Claims whole pages, unless some are claimed or the limit would be exceeded.
    pub(crate) fn new(pages: Range<u64>, terms: Terms<'_>) -> Result<Self> {
        let mut table = lock();
        let (address, size) = (pages.start, Bytes(pages.end - pages.start));
        if table.claimed.get_or_insert_default().overlaps(pages.clone()) {
            return Err(HostError::AlreadyRegistered { address, size });
        }
        // What was promised fits by itself; only what goes beyond it is checked.
        let promised = terms.promise.map_or(Bytes::ZERO, |promise| *promise.own());
        table.check(size - promised, terms.limit)?;
        if let Some(promise) = terms.promise {
            promise.keep(size, &mut table);
        }
        table.claimed.get_or_insert_default().insert(pages.clone());
        if terms.is_file {
            table.files = table.files + size;
        }
        Ok(Self { pages, is_file: terms.is_file })
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut table = lock();
        if let Some(claimed) = table.claimed.as_mut() {
            claimed.remove(self.pages.clone());
        }
        if self.is_file {
            table.files = table.files - Bytes(self.pages.end - self.pages.start);
        }
    }
}
