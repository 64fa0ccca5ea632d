//! The host emulator: a device whose memory is a file in RAM, for machines without a GPU and for tests.
//!
//! ```text
//!   calling thread  = compute stream (handle 0): a wait blocks it, a record completes at once
//!   a thread each   = copy streams: queues in order, run eagerly, lazily or at random (seeded)
//!   memfd           = device memory: pages really are mapped at several addresses
//! ```
//!
//! Device addresses are addresses of this process, so "compute" is any code that reads them. What the real
//! device would corrupt silently, the emulator corrupts too (a missing wait gives wrong bytes); what the real
//! driver would refuse or crash on is an error value with the reason.

mod counters;
mod kinds;
mod memory;
mod options;
mod queue;
mod registrations;
mod rng;
mod streams;
mod sync;
mod verbs;
mod work;

#[cfg(test)]
mod model;

pub use counters::HostCounters;
pub use options::{CopyOrder, HostOptions};

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::Result;
use crate::platform;
use crate::types::{Bytes, DeviceIdentity, DeviceInfo, DeviceKind, DeviceOrdinal};
use crate::verb::VerbCounts;
use counters::ByteSum;
use memory::Memory;
use registrations::Registrations;
use streams::Streams;
use work::{Link, Transfer};

/// Emulated devices of this process so far.
static DEVICES: AtomicU64 = AtomicU64::new(0);

/// An emulated device.
///
/// Dropping it ends its threads, discards copies that have not begun, and frees all of its addresses.
#[derive(Debug)]
pub struct HostDriver {
    // Declared before the memory: threads end before the addresses they write to go.
    streams: Streams<Transfer>,
    // Locked before the queue, never after it.
    tables: Mutex<Tables>,
    to_device: Option<Arc<Link>>,
    to_host: Option<Arc<Link>>,
    info: DeviceInfo,
    options: HostOptions,
    calls: VerbCounts,
    bytes_to_device: ByteSum,
    bytes_to_host: ByteSum,
    bytes_filled: ByteSum,
}

/// What is reserved, mapped and registered.
#[derive(Debug)]
struct Tables {
    memory: Memory,
    registrations: Registrations,
}

impl HostDriver {
    /// Makes a device. Refuses a size of zero, a granularity that is no power of two or below a page, and a
    /// bandwidth of zero.
    pub fn new(options: HostOptions) -> Result<Self> {
        options.check()?;
        let link = || options.bytes_per_second.map(|rate| Arc::new(Link::new(rate)));
        Ok(Self {
            streams: Streams::new(options.order, options.seed),
            tables: Mutex::new(Tables {
                memory: Memory::new(options.total, options.granularity)?,
                registrations: Registrations::default(),
            }),
            to_device: link(),
            to_host: link(),
            info: DeviceInfo {
                kind: DeviceKind::Host,
                identity: DeviceIdentity {
                    kind: DeviceKind::Host,
                    number: DEVICES.fetch_add(1, Ordering::Relaxed),
                },
                ordinal: DeviceOrdinal(0),
                name: "host emulator".into(),
                total_memory: options.total,
                granularity: options.granularity,
                driver_version: 0,
                kernel_driver: None,
                read_only_registration: true,
                batch_copies: true,
            },
            options,
            calls: VerbCounts::new(),
            bytes_to_device: ByteSum::default(),
            bytes_to_host: ByteSum::default(),
            bytes_filled: ByteSum::default(),
        })
    }

    /// The settings it was made with.
    pub const fn options(&self) -> &HostOptions {
        &self.options
    }

    /// What was done and what is alive now.
    pub fn counters(&self) -> HostCounters {
        let tables = self.tables();
        let alive = tables.memory.alive();
        let queue = self.streams.queue();
        HostCounters {
            calls: self.calls.snapshot(),
            bytes_to_device: self.bytes_to_device.get(),
            bytes_to_host: self.bytes_to_host.get(),
            bytes_filled: self.bytes_filled.get(),
            reservations_alive: alive.reservations,
            pages_alive: alive.pages,
            page_bytes_alive: alive.page_bytes,
            mappings_alive: alive.mappings,
            registrations_alive: tables.registrations.count(),
            streams_alive: queue.stream_count(),
            events_alive: queue.event_count(),
        }
    }

    /// The operating system's page, in which host memory is registered.
    pub fn page_size() -> Bytes {
        platform::page_size()
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
