//! What the emulator has done and what is still alive, so that tests can say exactly what leaked.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::Bytes;
use crate::verb::Verb;

/// A moment's counts of a [`HostDriver`](super::HostDriver).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostCounters {
    /// Calls of each verb so far, failed ones included.
    pub calls: BTreeMap<Verb, u64>,
    /// Bytes submitted to be copied to the device so far.
    pub bytes_to_device: Bytes,
    /// Bytes submitted to be copied to the host so far.
    pub bytes_to_host: Bytes,
    /// Bytes submitted to be filled so far.
    pub bytes_filled: Bytes,
    /// Address reservations alive.
    pub reservations_alive: u64,
    /// Page handles whose memory is alive; a released handle counts until its last mapping is gone.
    pub pages_alive: u64,
    /// Their bytes.
    pub page_bytes_alive: Bytes,
    /// Mappings alive.
    pub mappings_alive: u64,
    /// Host registrations alive.
    pub registrations_alive: u64,
    /// Copy streams alive.
    pub streams_alive: u64,
    /// Events alive.
    pub events_alive: u64,
}

impl HostCounters {
    /// How often a verb was called.
    pub fn calls_of(&self, verb: Verb) -> u64 {
        self.calls.get(&verb).copied().unwrap_or_default()
    }

    /// Whether everything that was made has been given back.
    pub fn nothing_alive(&self) -> bool {
        let counts = [
            self.reservations_alive,
            self.pages_alive,
            self.mappings_alive,
            self.registrations_alive,
            self.streams_alive,
            self.events_alive,
        ];
        counts.iter().all(|count| *count == 0)
    }
}

/// A sum of bytes, from any thread.
#[derive(Debug, Default)]
pub(super) struct ByteSum(AtomicU64);

impl ByteSum {
    pub(super) fn add(&self, bytes: Bytes) {
        self.0.fetch_add(bytes.0, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> Bytes {
        Bytes(self.0.load(Ordering::Relaxed))
    }
}
