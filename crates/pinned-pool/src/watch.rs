//! How a caller follows work that takes seconds, and ends it.
#![forbid(unsafe_code)]

use std::fmt;
use std::sync::Arc;

use gpu_driver::Bytes;

use crate::error::{HostError, Result};

/// What was done to bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Work {
    /// They were copied or read into a slab.
    Filled,
    /// They were read into the page cache, to be locked there.
    Cached,
    /// They were page-locked.
    Locked,
}

type Cancelled = Arc<dyn Fn() -> bool + Send + Sync>;
type Progress = Arc<dyn Fn(Work, Bytes) + Send + Sync>;

/// Follows the placing of a model, and ends it: asked between pieces of a few milliseconds, on several threads.
///
/// Registering a piece of 1 GiB is the longest that is not interrupted (40 ms at 24 GB/s).
#[derive(Clone, Default)]
pub struct Watch {
    cancelled: Option<Cancelled>,
    progress: Option<Progress>,
}

impl Watch {
    /// Follows nothing and never ends anything.
    pub fn new() -> Self {
        Self::default()
    }

    /// Ends the work once `cancelled` says so, with [`HostError::Cancelled`].
    #[must_use]
    pub fn cancelled_by(mut self, cancelled: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        self.cancelled = Some(Arc::new(cancelled));
        self
    }

    /// Tells `progress` of bytes as they are done, each kind of work apart.
    #[must_use]
    pub fn reports_to(mut self, progress: impl Fn(Work, Bytes) + Send + Sync + 'static) -> Self {
        self.progress = Some(Arc::new(progress));
        self
    }

    /// Whether to go on.
    ///
    /// # Errors
    /// [`HostError::Cancelled`] if not.
    pub fn check(&self) -> Result<()> {
        match &self.cancelled {
            Some(cancelled) if cancelled() => Err(HostError::Cancelled),
            _ => Ok(()),
        }
    }

    pub(crate) fn report(&self, work: Work, bytes: Bytes) {
        if let Some(progress) = &self.progress {
            progress(work, bytes);
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch")
            .field("cancellable", &self.cancelled.is_some())
            .field("reports", &self.progress.is_some())
            .finish()
    }
}
