//! Values that belong to the process that made them.
//!
//! A forked child has copies of them and none of their threads, and their device is the parent's: giving anything
//! back there would wait for ever, or worse. What a child drops is therefore leaked; the system takes it back at the
//! child's end.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A value that is dropped in the process that made it, and leaked in any other.
pub(crate) struct OfProcess<T> {
    /// Taken out only when this goes.
    value: Option<T>,
    process: u32,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Some(value), process: std::process::id() }
    }

    /// The value, if this is its process.
    pub(crate) fn into_inner(mut self) -> Option<T> {
        if self.process == std::process::id() { self.value.take() } else { None }
    }

    /// The value, unless it was taken.
    pub(crate) fn get(&self) -> Option<&T> {
        self.value.as_ref()
    }

    /// The value for changes, unless it was taken.
    pub(crate) fn get_mut(&mut self) -> Option<&mut T> {
        self.value.as_mut()
    }
}

impl<T: fmt::Debug> fmt::Debug for OfProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        let value = self.value.take();
        if self.process != std::process::id() {
            std::mem::forget(value);
        } else if catch_unwind(AssertUnwindSafe(move || drop(value))).is_err() {
            // Python drops these: a panic must not cross into it.
            tracing::error!("giving back what a model held panicked; some of it leaks");
        }
    }
}
