//! The host side of a model: where each tensor's bytes live and how a stretch of the line is copied from there.

mod builder;
mod check;
mod files;
mod in_place;
mod ladder;
mod locked;
mod options;
mod pieces;
mod registrar;
mod report;
mod slab_lock;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver};

pub use builder::HostStoreBuilder;
pub use options::{Levels, StoreOptions};
pub use report::{HostLevel, Placed, StepDown, StoreReport};

use crate::error::Result;
use crate::file::SourceFile;
use crate::registered::KeepAlive;
use crate::slab::{PADDING, Slab};
use crate::source::{HostBytes, HostRun, LineRun, SourceBytes};
use locked::Locked;

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
    bytes: SourceBytes,
    home: Home,
}

/// Whose bytes a place has.
#[derive(Debug, Clone)]
enum Home {
    /// Its owner's, in memory or in a file.
    Owner,
    /// Its owner's in a file, which the copy engine reads here.
    Mapped(HostBytes),
    /// The slab's, into which it was copied.
    Slab,
}

impl Home {
    fn is_slab(&self) -> bool {
        matches!(self, Self::Slab)
    }
}

/// What the builder collects and the store reads.
#[derive(Debug, Default)]
struct Places {
    /// By offset on the line, and by tensor, since empty ones take no room.
    line: BTreeMap<(u64, u32), Place>,
    /// Tensor → offset.
    offsets: HashMap<u32, u64>,
    /// Every file that tensors are read from.
    files: Vec<Arc<SourceFile>>,
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
    /// registration or in none of this store's. Only a tensor in the slab of more than 4 GiB, or where the slab was refused,
    /// may lie in two or be registered in part; a copy of it must then be cut as [`runs`](Self::runs) cuts it. What is not
    /// page-locked is as its owner left it, which may be registered in part by somebody else.
    ///
    /// `None` also for a tensor whose bytes are in a file: [`source_of`](Self::source_of) knows those.
    pub fn bytes_of(&self, id: u32) -> Option<&HostBytes> {
        self.places.get(id).and_then(|place| place.bytes.memory())
    }

    /// Where a tensor's bytes live now, in memory or in a file. Reading them from there is right at any time.
    pub fn source_of(&self, id: u32) -> Option<&SourceBytes> {
        self.places.get(id).map(|place| &place.bytes)
    }

    /// Where a tensor's bytes live and how the copy engine reads them.
    pub fn placed(&self, id: u32) -> Option<Placed> {
        self.places.get(id).map(|place| self.places.placed(place))
    }

    /// What must be copied to fill `line` bytes of the line, in order: one run where the slab holds it all and is registered
    /// in one piece; never a run that is registered in part, which the driver would refuse. Gaps between tensors
    /// are left out, except padding inside a run, and so are unlocked bytes in files: [`line_runs`](Self::line_runs) has
    /// them all. A run of a mapped file is for the copy engine alone: its bytes must not be read by host code, since the file
    /// may be cut short.
    pub fn runs(&self, line: Range<u64>) -> Vec<HostRun> {
        let in_memory = |run| match run {
            LineRun::Locked(run) => Some(run),
            LineRun::Staged { offset, bytes } => {
                bytes.memory().map(|bytes| HostRun::new(offset, bytes.clone()))
            }
        };
        self.line_runs(line).into_iter().filter_map(in_memory).collect()
    }

    /// As [`runs`](Self::runs), with what is not page-locked apart, since that goes through a staging ring: in pageable
    /// memory or in a file.
    pub fn line_runs(&self, line: Range<u64>) -> Vec<LineRun> {
        let mut runs = Vec::new();
        for (offset, bytes) in self.places.stretches(line) {
            match bytes {
                SourceBytes::Memory(bytes) => {
                    self.places.locked.split(&HostRun::new(offset, bytes), &mut runs);
                }
                SourceBytes::File(_) => runs.push(LineRun::Staged { offset, bytes }),
            }
        }
        runs
    }

    /// Whether every file that tensors are read from is still what it was: one call of the system a file, cheap enough
    /// for every step.
    ///
    /// # Errors
    /// [`HostError::FileChanged`](crate::HostError::FileChanged), of the first that is not.
    pub fn check_unchanged(&self) -> Result<()> {
        self.places.files.iter().try_for_each(|file| file.check_unchanged())
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
        let level = match (&place.bytes, &place.home) {
            (_, Home::Mapped(_)) => HostLevel::Mapped,
            (SourceBytes::File(_), _) => HostLevel::File,
            (SourceBytes::Memory(bytes), _) if !self.locked.covers(bytes.range()) => HostLevel::Pageable,
            (SourceBytes::Memory(_), Home::Slab) => HostLevel::Slab,
            (SourceBytes::Memory(_), _) => HostLevel::InPlace,
        };
        Placed { id: place.id, bytes: place.bytes.clone(), level, copied: place.home.is_slab() }
    }

    fn insert(&mut self, offset: u64, place: Place) {
        if let SourceBytes::File(bytes) = &place.bytes
            && !self.files.iter().any(|file| Arc::ptr_eq(file, bytes.file()))
        {
            self.files.push(Arc::clone(bytes.file()));
        }
        self.offsets.insert(place.id, offset);
        self.line.insert((offset, place.id), place);
    }

    /// The parts of tensors inside `line`; neighbours in the slab with only padding between them are one stretch.
    fn stretches(&self, line: Range<u64>) -> Vec<(u64, SourceBytes)> {
        let mut stretches: Vec<(Range<u64>, &Place, u64)> = Vec::new();
        let first = self.last_before(line.start).map_or(line.start, |(offset, _)| offset);
        for (&(offset, _), place) in self.line.range((first, 0)..(line.end.max(first), 0)) {
            let start = offset.max(line.start);
            let end = (offset + place.bytes.size().0).min(line.end);
            if start >= end {
                continue;
            }
            match stretches.last_mut() {
                Some((before, last, _))
                    if last.home.is_slab() && place.home.is_slab() && start - before.end < PADDING =>
                {
                    before.end = end;
                }
                _ => stretches.push((start..end, place, start - offset)),
            }
        }
        let bytes = |(range, place, skip): (Range<u64>, &Place, u64)| {
            (range.start, self.stretch(&range, place, skip))
        };
        stretches.into_iter().map(bytes).collect()
    }

    fn stretch(&self, range: &Range<u64>, place: &Place, skip: u64) -> SourceBytes {
        let size = Bytes(range.end - range.start);
        match (&place.bytes, &place.home, &self.slab) {
            (_, Home::Slab, Some(slab)) => {
                let keep: KeepAlive = Arc::<Slab>::clone(slab);
                // SAFETY: the stretch lies in the slab, which `keep` holds; its tensors are filled and are not written
                // again, and the padding between them is zeroes.
                SourceBytes::Memory(unsafe { HostBytes::new(slab.at(range.start), size, keep) })
            }
            (_, Home::Mapped(bytes), _) | (SourceBytes::Memory(bytes), ..) => {
                SourceBytes::Memory(bytes.part(skip, size, Arc::clone(bytes.keep())))
            }
            (SourceBytes::File(bytes), ..) => SourceBytes::File(bytes.part(skip, size)),
        }
    }
}
