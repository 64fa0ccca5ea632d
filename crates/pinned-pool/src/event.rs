//! Events as owned values.

use std::sync::Arc;

use gpu_driver::{Driver, EventHandle, StreamHandle};

use crate::error::Result;
use crate::registered::twice;

/// A point in a stream that other streams, or the host, can wait for. A new event counts as reached.
///
/// Recording again moves the mark; waits submitted before keep meaning the earlier one, so that one event serves a unit
/// for every step. Dropping an event never waits; work that waits for it is not disturbed.
#[derive(Debug)]
pub struct Event {
    driver: Arc<dyn Driver>,
    handle: EventHandle,
}

impl Event {
    /// Makes an event.
    pub fn new(driver: Arc<dyn Driver>) -> Result<Self> {
        let handle = driver.create_event()?;
        Ok(Self { driver, handle })
    }

    /// Makes an event that keeps the time at which its latest record was reached.
    pub fn timer(driver: Arc<dyn Driver>) -> Result<Self> {
        let handle = driver.create_timer()?;
        Ok(Self { driver, handle })
    }

    /// The seconds from this event's latest record to that of `later`, both timers; `None` while one has not been
    /// reached. Never blocks.
    pub fn seconds_until(&self, later: &Self) -> Result<Option<f64>> {
        Ok(self.driver.elapsed(self.handle, later.handle)?)
    }

    /// Marks the end of what `stream`, which may be a foreign one, holds now.
    pub fn record(&self, stream: StreamHandle) -> Result<()> {
        Ok(self.driver.record_event(self.handle, stream)?)
    }

    /// Makes later work of `stream`, which may be a foreign one, wait for the latest record. The host goes on, except on
    /// the emulator's compute stream, which is the calling thread.
    pub fn hold(&self, stream: StreamHandle) -> Result<()> {
        Ok(self.driver.wait_event(stream, self.handle)?)
    }

    /// Whether the latest record has been reached. Never blocks.
    pub fn is_reached(&self) -> Result<bool> {
        Ok(self.driver.query_event(self.handle)?)
    }

    /// Blocks the calling thread until the latest record has been reached.
    pub fn synchronize(&self) -> Result<()> {
        Ok(self.driver.synchronize_event(self.handle)?)
    }

    /// The driver's name of this event.
    pub fn handle(&self) -> EventHandle {
        self.handle
    }

    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let destroy = || {
            // SAFETY: the event was made in `new`, this is its only owner, and it is not used after it was destroyed.
            unsafe { self.driver.destroy_event(self.handle) }
        };
        if let Err(cause) = twice(destroy) {
            tracing::error!(%cause, event = ?self.handle, "an event was not destroyed");
        }
    }
}
