//! Which host memory is registered. Nothing is locked: the emulator only keeps the rules that the real driver has.

use std::collections::{BTreeMap, BTreeSet};

use crate::error::{DriverError, Result};
use crate::platform;
use crate::types::{Bytes, Registration};

/// The real driver's answer to registering a range twice.
const ALREADY_REGISTERED: u32 = 712;

/// The registered ranges, by first address.
#[derive(Debug, Default)]
pub(super) struct Registrations {
    ranges: BTreeMap<u64, Bytes>,
    /// Those of memory that may not be written.
    read_only: BTreeSet<u64>,
}

impl Registrations {
    pub(super) fn count(&self) -> u64 {
        self.ranges.len() as u64
    }

    /// The registered ranges that share a byte with `start..start + size`.
    fn touching(&self, start: u64, size: Bytes) -> impl Iterator<Item = (u64, Bytes)> {
        let end = start.saturating_add(size.0);
        let before = self.ranges.range(..start).next_back();
        let from = before.map_or(start, |(at, _)| *at);
        let found = self.ranges.range(from..end.max(from));
        found.map(|(at, size)| (*at, *size)).filter(move |(at, size)| at + size.0 > start)
    }

    pub(super) fn add(&mut self, start: u64, size: Bytes, registration: Registration) -> Result<()> {
        let page = platform::page_size();
        let whole_pages = start.is_multiple_of(page.0) && size.0.is_multiple_of(page.0);
        if start == 0 || size == Bytes::ZERO || !whole_pages || start.checked_add(size.0).is_none() {
            return Err(DriverError::InvalidArgument {
                call: "register_host",
                what: format!("{size} at {start:#x}; it takes whole pages of {page}"),
            });
        }
        if let Some((other, _)) = self.touching(start, size).next() {
            return Err(DriverError::Call {
                call: "register_host",
                code: ALREADY_REGISTERED,
                name: "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED".into(),
                detail: format!(": {size} at {start:#x}; the registration at {other:#x} overlaps it"),
            });
        }
        self.ranges.insert(start, size);
        if registration == Registration::ReadOnly {
            self.read_only.insert(start);
        }
        Ok(())
    }

    /// The size of the registration that starts here.
    pub(super) fn size_at(&self, start: u64) -> Option<Bytes> {
        self.ranges.get(&start).copied()
    }

    pub(super) fn remove(&mut self, start: u64) {
        self.ranges.remove(&start);
        self.read_only.remove(&start);
    }

    /// Whether `start` lies in memory that was registered as read-only, such as a file's.
    pub(super) fn is_read_only(&self, start: u64) -> bool {
        self.touching(start, Bytes(1)).any(|(at, _)| self.read_only.contains(&at))
    }

    /// Refuses host memory that is registered only in part, as the real driver does.
    pub(super) fn check_source(&self, call: &'static str, start: u64, size: Bytes) -> Result<()> {
        let end = start.checked_add(size.0);
        let (false, Some(end)) = (start == 0, end) else {
            return Err(DriverError::InvalidArgument {
                call,
                what: format!("{size} at host address {start:#x}"),
            });
        };
        let split = self.touching(start, size).find(|(at, size)| *at > start || at + size.0 < end);
        if let Some((at, registered)) = split {
            return Err(DriverError::InvalidArgument {
                call,
                what: format!(
                    "{size} at host address {start:#x}, of which only {registered} from {at:#x} are registered; \
                     register all of it in one piece, or cut the copy there"
                ),
            });
        }
        Ok(())
    }
}
