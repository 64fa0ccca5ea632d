//! What an emulated device is like: its size, its granularity, its link and the order in which its copies run.

use crate::error::{DriverError, Result};
use crate::platform;
use crate::types::Bytes;

/// When the copies submitted to the emulator's copy streams run.
///
/// Each stream is in order always; the choice is how far a stream has run at a moment when nobody waits for it.
/// Code that waits correctly cannot tell the three apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CopyOrder {
    /// As soon as possible. A missing wait of a *copy* for the last use shows here.
    #[default]
    Eager,
    /// Only when somebody waits, and no further than needed. A missing wait for a *copy* shows here.
    Lazy,
    /// Seeded: each submission may let the stream run some way, copies go in shuffled pieces, and some are done
    /// in part long before they finish.
    Random,
}

/// The settings of an emulated device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostOptions {
    pub(super) total: Bytes,
    pub(super) granularity: Bytes,
    pub(super) bytes_per_second: Option<u64>,
    pub(super) order: CopyOrder,
    pub(super) seed: u64,
}

impl HostOptions {
    /// The granularity unless another is set. Real devices have 2 MiB; a smaller one lets small test models have
    /// several granules.
    pub const DEFAULT_GRANULARITY: Bytes = Bytes::kib(64);

    /// A device with `total` bytes of memory, 64 KiB granularity, copies as fast as memory allows, run eagerly.
    /// Memory is taken from the machine only as it is written.
    pub const fn new(total: Bytes) -> Self {
        Self {
            total,
            granularity: Self::DEFAULT_GRANULARITY,
            bytes_per_second: None,
            order: CopyOrder::Eager,
            seed: 0,
        }
    }

    /// Sets the smallest piece of physical memory: a power of two, at least the operating system's page.
    #[must_use]
    pub const fn granularity(mut self, granularity: Bytes) -> Self {
        self.granularity = granularity;
        self
    }

    /// Models a link of this many bytes a second in each direction, shared by all streams; `None` is no limit.
    #[must_use]
    pub const fn bandwidth(mut self, bytes_per_second: Option<u64>) -> Self {
        self.bytes_per_second = bytes_per_second;
        self
    }

    /// Sets when copies run.
    #[must_use]
    pub const fn order(mut self, order: CopyOrder) -> Self {
        self.order = order;
        self
    }

    /// Sets the seed of [`CopyOrder::Random`]; the other orders ignore it.
    #[must_use]
    pub const fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Refuses settings no device could have.
    pub(super) fn check(&self) -> Result<()> {
        let refuse = |what: String| Err(DriverError::InvalidArgument { call: "HostDriver::new", what });
        let page = platform::page_size();
        if self.total == Bytes::ZERO {
            return refuse("a device of 0 bytes".into());
        }
        if !self.granularity.0.is_power_of_two() || self.granularity < page {
            return refuse(format!(
                "granularity {}; it must be a power of two and at least the page of {page}",
                self.granularity
            ));
        }
        if self.granularity > self.total {
            return refuse(format!("granularity {} above the device's {}", self.granularity, self.total));
        }
        if self.bytes_per_second == Some(0) {
            return refuse("a bandwidth of 0 bytes a second".into());
        }
        Ok(())
    }
}
