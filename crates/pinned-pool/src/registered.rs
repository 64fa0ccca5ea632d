//! Page-locked memory that is unlocked before it can be freed, by type.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver, Registration};

use crate::claims::{Claim, Terms};
use crate::error::{HostError, Result};
use crate::system;

/// Whatever keeps memory alive.
pub type KeepAlive = Arc<dyn Any + Send + Sync>;

/// Host memory the device's copy engine can read directly.
///
/// **Drop order.** The memory is unregistered, then its keep-alives go. Freed before it is unregistered, it would make
/// later, unrelated calls fail and copies read garbage; so if the driver refuses to unregister, the keep-alives are
/// leaked with an error in the log. Drop does not wait for copies: whoever submits one holds this until it has run, as
/// [`TransferStream`](crate::TransferStream) does.
pub struct Registered {
    driver: Arc<dyn Driver>,
    address: *mut u8,
    size: Bytes,
    claim: ManuallyDrop<Claim>,
    keep: ManuallyDrop<Vec<KeepAlive>>,
}

// SAFETY: the pointer is a name for the driver and is never followed here; everything else is `Send`.
unsafe impl Send for Registered {}
// SAFETY: as for `Send`; there is no interior mutability.
unsafe impl Sync for Registered {}

impl Registered {
    /// Page-locks `size` bytes at `address` for as long as this lives; with `limit`, only while the process's
    /// [`registered_bytes`](crate::registered_bytes) stay within it.
    ///
    /// # Errors
    /// If the memory is not whole pages, if pages of it are registered already, over the limit, or if the driver refuses.
    /// Nothing is registered then, and the keep-alives are dropped.
    ///
    /// # Safety
    /// The range is mapped, is no private file mapping, and stays mapped until the keep-alives are dropped.
    pub unsafe fn new(
        driver: Arc<dyn Driver>,
        address: *mut u8,
        size: Bytes,
        registration: Registration,
        limit: Option<Bytes>,
        keep: Vec<KeepAlive>,
    ) -> Result<Self> {
        let terms = Terms { limit, promise: None, is_file: false };
        // SAFETY: the caller's promise.
        unsafe { Self::on_terms(driver, address, size, registration, terms, keep) }
    }

    /// As [`new`](Self::new), counted as `terms` say.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    pub(crate) unsafe fn on_terms(
        driver: Arc<dyn Driver>,
        address: *mut u8,
        size: Bytes,
        registration: Registration,
        terms: Terms<'_>,
        keep: Vec<KeepAlive>,
    ) -> Result<Self> {
        let (start, page) = (address as u64, system::page_size());
        if size == Bytes::ZERO || !start.is_multiple_of(page) || !size.0.is_multiple_of(page) {
            return Err(HostError::NotWholePages { address: start, size, page: Bytes(page) });
        }
        let claim = Claim::new(start..start + size.0, terms)?;
        // SAFETY: whole pages, checked above; mapped long enough and of a fit kind by the caller's promise, since the
        // keep-alives are dropped only after `unregister_host`.
        let registered = unsafe { driver.register_host(address, size, registration) };
        if let Err(cause) = registered {
            clear_error(&*driver);
            return Err(HostError::Register { address: start, size, cause });
        }
        Ok(Self { driver, address, size, claim: ManuallyDrop::new(claim), keep: ManuallyDrop::new(keep) })
    }

    /// Where the memory begins.
    pub fn address(&self) -> *const u8 {
        self.address
    }

    /// Its size.
    pub fn size(&self) -> Bytes {
        self.size
    }

    fn unregister(&self) -> gpu_driver::Result<()> {
        // SAFETY: the registration was made in `new` and is in force; every submitted copy that reads the range holds
        // this value, which is being dropped.
        unsafe { self.driver.unregister_host(self.address) }
    }
}

impl fmt::Debug for Registered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("address", &self.address)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if let Err(cause) = twice(|| self.unregister()) {
            tracing::error!(%cause, address = ?self.address, size = %self.size, "memory stays page-locked and is leaked");
            return;
        }
        // SAFETY: dropped here once; nothing uses it after.
        unsafe { ManuallyDrop::drop(&mut self.claim) };
        // SAFETY: as above; the memory is no longer registered.
        unsafe { ManuallyDrop::drop(&mut self.keep) };
    }
}

/// Takes whatever error a refused registration left behind, so that no later, innocent call reports it. The driver
/// interface keeps none of its own; but what lies under it may, and gives it to the next call. A broken device's error is
/// reported again and again, and is not lost by this.
fn clear_error(driver: &dyn Driver) {
    if let Err(pending) = driver.memory_info() {
        tracing::debug!(%pending, "an error was pending after host page-lock was refused");
    }
}

/// A refusal to give something back may pass, and what is not given back is lost for the life of the process.
pub(crate) fn twice<T, E>(act: impl Fn() -> Result<T, E>) -> Result<T, E> {
    act().or_else(|_| act())
}
