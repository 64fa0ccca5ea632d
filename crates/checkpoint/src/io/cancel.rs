//! A flag that stops reads and writes from outside.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{CheckpointError, Result};

/// A flag that any thread may set, and that long work looks at between two chunks. Clones are the same flag.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the flag for good.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it is set.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// An error if it is set.
    pub fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(CheckpointError::Cancelled) } else { Ok(()) }
    }
}
