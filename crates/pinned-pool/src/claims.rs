//! Which pages of this process are registered through this crate. A page registered twice fails in some drivers and
//! counts double in others, so that every registration claims its pages here first, whatever store it is for.
#![forbid(unsafe_code)]

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpu_driver::Bytes;

use crate::error::{HostError, Result};
use crate::ranges::Ranges;

// One table a process: pages are the process's, whoever registers them.
static CLAIMED: Mutex<Option<Ranges>> = Mutex::new(None);

fn lock() -> MutexGuard<'static, Option<Ranges>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many bytes are page-locked through this crate now, in all stores of the process.
pub fn registered_bytes() -> Bytes {
    Bytes(lock().as_ref().map_or(0, Ranges::total))
}

/// Pages that nobody else may register while this lives.
#[derive(Debug)]
pub(crate) struct Claim(Range<u64>);

impl Claim {
    /// Claims whole pages, unless some are claimed or `limit` would be exceeded.
    pub(crate) fn new(pages: Range<u64>, limit: Option<Bytes>) -> Result<Self> {
        let mut guard = lock();
        let claimed = guard.get_or_insert_default();
        let (address, size) = (pages.start, Bytes(pages.end - pages.start));
        if claimed.overlaps(pages.clone()) {
            return Err(HostError::AlreadyRegistered { address, size });
        }
        let registered = Bytes(claimed.total());
        if let Some(limit) = limit
            && registered + size > limit
        {
            return Err(HostError::RegisterLimit { asked: size, limit, registered });
        }
        claimed.insert(pages.clone());
        Ok(Self(pages))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(claimed) = lock().as_mut() {
            claimed.remove(self.0.clone());
        }
    }
}
