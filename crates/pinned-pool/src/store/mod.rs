//! The host side of a model: where each tensor's bytes live and how a stretch of the line is copied from there.

mod builder;
mod check;
mod in_place;
mod locked;
mod pieces;
mod report;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver};

pub use builder::HostStoreBuilder;
pub use report::{HostLevel, Placed, StepDown, StoreReport};

use crate::registered::KeepAlive;
use crate::slab::Slab;
use crate::source::{HostBytes, HostRun};
use locked::Locked;

/// Tensors on the line start at multiples of this, so that a smaller gap between two in the slab is padding.
const PADDING: u64 = 512;

/// How a [`HostStore`] places tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// Copy every tensor into the slab, as if none could stay in place.
    pub slab_only: bool,
    /// The shortest run of pages that is registered where it lies, and the size from which a tensor counts as having its
    /// pages to itself. By default 32 MiB: glibc's threshold for giving an allocation a mapping of its own moves, but
    /// never beyond `DEFAULT_MMAP_THRESHOLD_MAX`, 4·1024·1024·`sizeof(long)` (mallopt(3), `M_MMAP_THRESHOLD`). Smaller
    /// allocations may share pages with others, whose copies the driver would refuse.
    pub min_in_place: Bytes,
    /// The size of the pieces in which the slab is registered if it is refused as a whole. Pieces are up to four times
    /// as long so that no tensor is cut.
    pub chunk: Bytes,
    /// The most that may be page-locked in this process; beyond it, bytes stay pageable. By default
    /// [`memory_limit`](crate::memory_limit).
    pub register_limit: Option<Bytes>,
    /// Threads that copy into the slab; by default one a core, at most 16.
    pub threads: Option<usize>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            slab_only: false,
            min_in_place: Bytes::mib(32),
            chunk: Bytes::mib(256),
            register_limit: None,
            threads: None,
        }
    }
}

/// Where the bytes of a model's tensors live on the host, and how they are copied from there.
///
/// Dropping it unregisters what it registered, unless a copy in flight still holds it; the bytes themselves live on
/// while anyone holds a [`HostBytes`] of them.
#[derive(Debug)]
pub struct HostStore {
    places: Places,
    report: StoreReport,
}

/// One tensor's place.
#[derive(Debug)]
struct Place {
    id: u32,
    bytes: HostBytes,
    /// Its owner's bytes, registered; otherwise it was copied into the slab.
    stays: bool,
}

/// What the builder collects and the store reads.
#[derive(Debug, Default)]
struct Places {
    /// By offset on the line, and by tensor, since empty ones take no room.
    line: BTreeMap<(u64, u32), Place>,
    /// Tensor → offset.
    offsets: HashMap<u32, u64>,
    slab: Option<Arc<Slab>>,
    /// Every registration, of tensors in place and of the slab.
    locked: Locked,
}

impl HostStore {
    /// Begins a store for tensors on a line of `line` bytes.
    pub fn builder(driver: Arc<dyn Driver>, line: Bytes, options: StoreOptions) -> HostStoreBuilder {
        HostStoreBuilder::new(driver, line, options)
    }

    /// Where a tensor's bytes live now. A clone keeps them alive, not page-locked.
    ///
    /// All of them, or any part, can be copied in one call of the driver while the store lives: they lie in one
    /// registration or in none. Only where the slab was refused as a whole, or fills more than 64 GiB without a hole, may
    /// a tensor lie in two or be registered in part; a copy of it must then be cut as [`runs`](Self::runs) cuts it.
    pub fn bytes_of(&self, id: u32) -> Option<&HostBytes> {
        self.places.get(id).map(|place| &place.bytes)
    }

    /// Where a tensor's bytes live and how the copy engine reads them.
    pub fn placed(&self, id: u32) -> Option<Placed> {
        self.places.get(id).map(|place| self.places.placed(place))
    }

    /// What must be copied to fill `line` bytes of the line, in order: one run where the slab holds it all and is registered
    /// in one piece; never a run that is registered in part, which the driver would refuse. Gaps between tensors
    /// are left out, except padding inside a run.
    pub fn runs(&self, line: Range<u64>) -> Vec<HostRun> {
        let mut runs = Vec::new();
        for stretch in self.places.stretches(line) {
            self.places.locked.split(&stretch, &mut runs);
        }
        runs
    }

    /// The store in numbers.
    pub fn report(&self) -> &StoreReport {
        &self.report
    }
}

impl Places {
    fn get(&self, id: u32) -> Option<&Place> {
        let offset = *self.offsets.get(&id)?;
        self.line.get(&(offset, id))
    }

    /// The last tensor that begins before `end`, empty ones apart, and its offset.
    fn last_before(&self, end: u64) -> Option<(u64, &Place)> {
        let before = self.line.range(..(end, 0)).rev().find(|(_, place)| place.bytes.size() > Bytes::ZERO);
        before.map(|(&(offset, _), place)| (offset, place))
    }

    /// The address ranges of the tensors in the slab, in order, since it mirrors the line.
    fn in_slab(&self) -> Vec<Range<u64>> {
        let copied = self.line.values().filter(|place| !place.stays && place.bytes.size() > Bytes::ZERO);
        copied.map(|place| place.bytes.range()).collect()
    }

    fn placed(&self, place: &Place) -> Placed {
        let level = if place.stays {
            HostLevel::InPlace
        } else if self.locked.covers(place.bytes.range()) {
            HostLevel::Slab
        } else {
            HostLevel::Pageable
        };
        Placed { id: place.id, bytes: place.bytes.clone(), level }
    }

    /// The parts of tensors inside `line`; neighbours in the slab with only padding between them are one stretch.
    fn stretches(&self, line: Range<u64>) -> Vec<HostRun> {
        let mut stretches: Vec<(Range<u64>, &Place, u64)> = Vec::new();
        let first = self.last_before(line.start).map_or(line.start, |(offset, _)| offset);
        for (&(offset, _), place) in self.line.range((first, 0)..(line.end.max(first), 0)) {
            let start = offset.max(line.start);
            let end = (offset + place.bytes.size().0).min(line.end);
            if start >= end {
                continue;
            }
            match stretches.last_mut() {
                Some((before, last, _)) if !last.stays && !place.stays && start - before.end < PADDING => {
                    before.end = end;
                }
                _ => stretches.push((start..end, place, start - offset)),
            }
        }
        stretches.into_iter().map(|(range, place, skip)| self.stretch(&range, place, skip)).collect()
    }

    fn stretch(&self, range: &Range<u64>, place: &Place, skip: u64) -> HostRun {
        let size = Bytes(range.end - range.start);
        let bytes = match (&self.slab, place.stays) {
            (Some(slab), false) => {
                let keep: KeepAlive = Arc::<Slab>::clone(slab);
                // SAFETY: the stretch lies in the slab, which `keep` holds; its tensors are filled and are not written
                // again, and the padding between them is zeroes.
                unsafe { HostBytes::new(slab.at(range.start), size, keep) }
            }
            _ => place.bytes.part(skip, size, Arc::clone(place.bytes.keep())),
        };
        HostRun::new(range.start, bytes)
    }
}
