//! The host side of a model: where each tensor's bytes live and how a stretch of the line is copied from there.

mod builder;
mod check;
mod in_place;
mod locked;
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
    /// The shortest run of whole pages that is registered where it lies; tensors that begin and end inside pages make
    /// runs up to two pages shorter than they are. Shorter ones are copied: registering has a cost a call.
    pub min_in_place: Bytes,
    /// How much of the slab is filled before it is registered: enough for the full rate of 24 to 33 GB/s.
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
            min_in_place: Bytes::mib(16),
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
    /// Which of its bytes are its owner's, registered; the others were copied into the slab.
    stays: Range<u64>,
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

    /// Where a tensor's bytes live now, all of them in one piece. A clone keeps them alive, not page-locked. To read, not
    /// to copy to a device from: they may be registered in part, and [`runs`](Self::runs) knows where.
    pub fn bytes_of(&self, id: u32) -> Option<&HostBytes> {
        self.places.get(id).map(|place| &place.bytes)
    }

    /// Where a tensor's bytes live and how the copy engine reads them.
    pub fn placed(&self, id: u32) -> Option<Placed> {
        self.places.get(id).map(|place| self.places.placed(place))
    }

    /// What must be copied to fill `line` bytes of the line, in order: one run where the slab holds it all and is registered
    /// in one piece; never a run that is registered in part, which the driver would refuse. A tensor in place is up to
    /// three runs, of which the ends share theirs with the neighbours'. Gaps between tensors are left out, except
    /// padding inside a run.
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

    fn placed(&self, place: &Place) -> Placed {
        let level = if !place.stays.is_empty() {
            HostLevel::InPlace
        } else if self.locked.covers(place.bytes.range()) {
            HostLevel::Slab
        } else {
            HostLevel::Pageable
        };
        Placed { id: place.id, bytes: place.bytes.clone(), level }
    }

    /// Adds up the bytes of tensors by the level they are read at.
    fn count(&self, report: &mut StoreReport) {
        for (&(offset, _), place) in &self.line {
            for (piece, stays) in pieces(place.bytes.size(), &place.stays) {
                let size = Bytes(piece.end - piece.start);
                if stays {
                    report.in_place = report.in_place + size;
                } else if let Some(bytes) = self.slab_bytes(&(offset + piece.start..offset + piece.end)) {
                    let pageable = self.locked.missing(bytes.range());
                    let pageable = pageable.iter().map(|range| Bytes(range.end - range.start)).sum();
                    report.slab = report.slab + (size - pageable);
                    report.pageable = report.pageable + pageable;
                }
            }
        }
    }

    /// What lies inside `line`, cut where tensors end and where the slab does; neighbours in the slab with only padding
    /// between them are one stretch.
    fn stretches(&self, line: Range<u64>) -> Vec<HostRun> {
        let mut stretches: Vec<(Range<u64>, Option<HostBytes>)> = Vec::new();
        let first = self.last_before(line.start).map_or(line.start, |(offset, _)| offset);
        for (&(offset, _), place) in self.line.range((first, 0)..(line.end.max(first), 0)) {
            for (piece, stays) in pieces(place.bytes.size(), &place.stays) {
                let range = (offset + piece.start).max(line.start)..(offset + piece.end).min(line.end);
                if range.is_empty() {
                    continue;
                }
                if stays {
                    let (skip, size) = (range.start - offset, Bytes(range.end - range.start));
                    let bytes = place.bytes.part(skip, size, Arc::clone(place.bytes.keep()));
                    stretches.push((range, Some(bytes)));
                    continue;
                }
                match stretches.last_mut() {
                    Some((before, None)) if range.start - before.end < PADDING => before.end = range.end,
                    _ => stretches.push((range, None)),
                }
            }
        }
        let run = |(range, bytes): (Range<u64>, Option<HostBytes>)| {
            let bytes = bytes.or_else(|| self.slab_bytes(&range))?;
            Some(HostRun::new(range.start, bytes))
        };
        stretches.into_iter().filter_map(run).collect()
    }

    /// A stretch of the line as it lies in the slab.
    fn slab_bytes(&self, range: &Range<u64>) -> Option<HostBytes> {
        let slab = self.slab.as_ref()?;
        let keep: KeepAlive = Arc::<Slab>::clone(slab);
        // SAFETY: the stretch lies in the slab, which `keep` holds; what is filled of it is not written again, and the
        // padding between is zeroes.
        Some(unsafe { HostBytes::new(slab.at(range.start), Bytes(range.end - range.start), keep) })
    }
}

/// A tensor of `size` bytes in pieces, and which of them stay in place.
fn pieces(size: Bytes, stays: &Range<u64>) -> impl Iterator<Item = (Range<u64>, bool)> + use<> {
    let pieces = [(0..stays.start, false), (stays.clone(), true), (stays.end..size.0, false)];
    pieces.into_iter().filter(|(piece, _)| !piece.is_empty())
}
