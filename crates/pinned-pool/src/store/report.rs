//! What a store did, as data.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use gpu_driver::Bytes;

use super::Places;
use crate::error::HostError;
use crate::source::SourceBytes;

/// How the copy engine reads a tensor's host bytes, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HostLevel {
    /// Registered where the page cache has the file: no copy, no second RAM, shared by processes.
    Mapped,
    /// Registered where its owner had them: no copy, no second RAM.
    InPlace,
    /// Copied into the slab, which is registered.
    Slab,
    /// In memory that is not page-locked: its owner's, or the slab where registering it was refused.
    Pageable,
    /// In a file, read when it is needed.
    File,
}

/// Where a tensor went.
#[derive(Debug, Clone)]
pub struct Placed {
    /// The tensor.
    pub id: u32,
    /// Where its bytes live from now on. While the store lives, bytes in memory can be given to the driver whole, as
    /// [`HostStore::bytes_of`](crate::HostStore::bytes_of) says.
    pub bytes: SourceBytes,
    /// How they are read. The slab is registered when the store is finished and counts as pageable until then.
    pub level: HostLevel,
    pub(super) copied: bool,
}

impl Placed {
    /// Whether the bytes were copied, so that the source may be dropped.
    pub fn is_copied(&self) -> bool {
        self.copied
    }
}

/// A level that was refused, with the first reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepDown {
    /// The level that was tried.
    pub from: HostLevel,
    /// The level that was used instead.
    pub to: HostLevel,
    /// Why, the first time.
    pub reason: HostError,
    /// How often.
    pub times: u64,
}

/// A store in numbers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StoreReport {
    /// Tensor bytes registered in the page cache.
    pub mapped: Bytes,
    /// Tensor bytes registered where they were.
    pub in_place: Bytes,
    /// Tensor bytes in registered slab memory.
    pub slab: Bytes,
    /// Tensor bytes in memory that is not registered.
    pub pageable: Bytes,
    /// Tensor bytes that are read from files.
    pub in_files: Bytes,
    /// Bytes that are page-locked for this store: whole pages, so a little more than `mapped`, `in_place` and `slab`. What
    /// it shares with other stores is in theirs as well.
    pub registered: Bytes,
    /// In how many registrations.
    pub registrations: usize,
    /// Levels that were refused; at most one entry a level.
    pub step_downs: Vec<StepDown>,
}

impl StoreReport {
    pub(crate) fn step_down(&mut self, from: HostLevel, to: HostLevel, reason: HostError) {
        if let Some(known) = self.step_downs.iter_mut().find(|known| known.from == from && known.to == to) {
            known.times += 1;
            return;
        }
        if first_of_process(from, to) {
            tracing::warn!(%reason, ?from, ?to, "host page-lock steps down one level; later ones are told at level info");
        } else {
            tracing::info!(%reason, ?from, ?to, "host page-lock steps down one level");
        }
        self.step_downs.push(StepDown { from, to, reason, times: 1 });
    }

    /// Adds up what is in place.
    pub(super) fn count(&mut self, places: &Places) {
        for place in places.line.values() {
            let total = match places.placed(place).level {
                HostLevel::Mapped => &mut self.mapped,
                HostLevel::InPlace => &mut self.in_place,
                HostLevel::Slab => &mut self.slab,
                HostLevel::Pageable => &mut self.pageable,
                HostLevel::File => &mut self.in_files,
            };
            *total = *total + place.bytes.size();
        }
        self.registered = places.locked.bytes();
        self.registrations = places.locked.len();
    }
}

/// Whether this process has not warned of this step yet: dozens of models would say the same.
fn first_of_process(from: HostLevel, to: HostLevel) -> bool {
    static SAID: Mutex<BTreeSet<(HostLevel, HostLevel)>> = Mutex::new(BTreeSet::new());
    SAID.lock().unwrap_or_else(PoisonError::into_inner).insert((from, to))
}
