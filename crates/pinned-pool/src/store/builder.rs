//! Placing a model's tensors, group by group, so that each group's sources can be dropped before the next is touched.

use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver, Registration};
use rayon::ThreadPool;

use super::check::check;
use super::in_place::{Candidate, candidates, may_stay};
use super::pieces::pieces;
use super::report::{HostLevel, Placed, StoreReport};
use super::{Home, HostStore, Place, Places, StoreOptions};
use crate::error::Result;
use crate::limits::memory_limit;
use crate::maps::HostMaps;
use crate::ranges::Ranges;
use crate::registered::{KeepAlive, Registered};
use crate::slab::{Fill, Slab, fill_threads};
use crate::source::{HostBytes, SourceBytes, SourceTensor};
use crate::system;

/// The most that is registered in one call: drivers refuse 512 GiB.
const LONGEST: u64 = 64 << 30;

/// How many times as long as wanted a piece may be so that no tensor is cut.
const STRETCH: u64 = 4;

/// A [`HostStore`] being filled.
#[derive(Debug)]
pub struct HostStoreBuilder {
    driver: Arc<dyn Driver>,
    line: Bytes,
    options: StoreOptions,
    places: Places,
    report: StoreReport,
    threads: Option<ThreadPool>,
}

impl HostStoreBuilder {
    pub(super) fn new(driver: Arc<dyn Driver>, line: Bytes, mut options: StoreOptions) -> Self {
        options.register_limit = options.register_limit.or_else(memory_limit);
        Self {
            driver,
            line,
            options,
            places: Places::default(),
            report: StoreReport::default(),
            threads: None,
        }
    }

    /// Places a group of tensors, such as a block's. When it returns, the bytes of those that were copied
    /// ([`Placed::is_copied`]) are no longer needed where they came from: drop their sources before the next group, and RAM
    /// never holds more than the model and one group.
    ///
    /// # Errors
    /// If a tensor lies outside the line, overlaps another or was placed before, or if there is no memory for the slab.
    /// No tensor of the group is placed then. A refused registration is no error: the next level is used, and the
    /// report says why.
    pub fn place(&mut self, group: &[SourceTensor]) -> Result<Vec<Placed>> {
        check(group, &self.places, self.line)?;
        let (kept, registered) = self.register_in_place(group);
        let is_copied =
            |index: usize, source: &SourceTensor| !kept[index] && source.bytes.size() > Bytes::ZERO;
        let copied = group.iter().enumerate().filter(|(index, source)| is_copied(*index, source));
        let copied = copied.filter_map(|(_, source)| Some((source.offset, source.bytes.memory()?)));
        let copied: Vec<(u64, &HostBytes)> = copied.collect();
        // Before anything is entered, since it may fail; what was registered is then unregistered by its drop.
        let slab = self.copy_into_slab(&copied)?;
        for registered in registered {
            self.places.locked.insert(registered);
        }
        for (source, &in_place) in group.iter().zip(&kept) {
            let (bytes, home) = match (&source.bytes, &slab) {
                // An empty tensor must not keep the storage alive that it is a view of.
                (bytes, _) if bytes.size() == Bytes::ZERO => (HostBytes::empty().into(), Home::Slab),
                (SourceBytes::Memory(_), Some(slab)) if !in_place => {
                    (slab_bytes(slab, source).into(), Home::Slab)
                }
                (bytes, _) => (bytes.clone(), Home::Owner),
            };
            self.places.insert(source.offset, Place { id: source.id, bytes, home });
        }
        let places = group.iter().filter_map(|source| self.places.get(source.id));
        Ok(places.map(|place| self.places.placed(place)).collect())
    }

    /// Registers the slab and ends placing.
    pub fn finish(mut self) -> HostStore {
        self.register_slab();
        let mut report = self.report;
        for place in self.places.line.values() {
            let total = match self.places.placed(place).level {
                HostLevel::InPlace => &mut report.in_place,
                HostLevel::Slab => &mut report.slab,
                HostLevel::Pageable => &mut report.pageable,
                HostLevel::File => &mut report.in_files,
            };
            *total = *total + place.bytes.size();
        }
        report.registered = self.places.locked.bytes();
        report.registrations = self.places.locked.len();
        HostStore { places: self.places, report }
    }

    /// Registers the runs that may stay in place: which tensors do, and their registrations.
    fn register_in_place(&mut self, group: &[SourceTensor]) -> (Vec<bool>, Vec<Registered>) {
        let memory = |source: &SourceTensor| source.bytes.memory().map_or(0..0, HostBytes::range);
        let tensors: Vec<Range<u64>> = group.iter().map(memory).collect();
        // What is a view of bytes in place stays as they do.
        let mut kept: Vec<bool> =
            tensors.iter().map(|bytes| self.places.locked.holds_whole(bytes.clone())).collect();
        let mut registered = Vec::new();
        if self.options.slab_only || !may_stay(&tensors, self.options.min_in_place) {
            return (kept, registered);
        }
        // Read anew for every group: memory that was freed since may have become a file mapping.
        let found = HostMaps::read()
            .map(|maps| candidates(&tensors, &maps, &self.places.locked, self.options.min_in_place));
        let found = found.unwrap_or_else(|reason| {
            self.report.step_down(HostLevel::InPlace, HostLevel::Slab, reason);
            Vec::new()
        });
        for Candidate { pages, members } in found {
            let keep = members.iter().filter_map(|&index| group[index].bytes.memory());
            let keep = keep.map(|bytes| Arc::clone(bytes.keep())).collect();
            match self.register(pages, keep) {
                Ok(run) => {
                    for index in members {
                        kept[index] = true;
                    }
                    registered.push(run);
                }
                Err(reason) => self.report.step_down(HostLevel::InPlace, HostLevel::Slab, reason),
            }
        }
        (kept, registered)
    }

    fn register(&self, pages: Range<u64>, keep: Vec<KeepAlive>) -> Result<Registered> {
        let size = Bytes(pages.end - pages.start);
        let driver = Arc::clone(&self.driver);
        let limit = self.options.register_limit;
        // SAFETY: whole pages of anonymous memory: of the slab, or found so in the maps. Each page holds bytes that `keep`
        // keeps alive, so none is unmapped before it is dropped.
        unsafe { Registered::new(driver, pages.start as *mut u8, size, Registration::ReadWrite, limit, keep) }
    }

    /// Copies tensors to their offsets in the slab, which is made for the first one.
    fn copy_into_slab(&mut self, sources: &[(u64, &HostBytes)]) -> Result<Option<Arc<Slab>>> {
        if sources.is_empty() {
            return Ok(self.places.slab.clone());
        }
        let slab = match &self.places.slab {
            Some(slab) => Arc::clone(slab),
            None => Arc::new(Slab::new(self.line)?),
        };
        let threads = match self.threads.take() {
            Some(threads) => threads,
            None => fill_threads(self.options.threads)?,
        };
        let fills: Vec<Fill<'_>> = sources.iter().map(|&(offset, bytes)| Fill { offset, bytes }).collect();
        // SAFETY: the tensors lie on the line, which the slab is as long as, and overlap neither each other nor tensors
        // placed before (`check`); nobody was given these bytes of the slab yet.
        unsafe { slab.fill(&fills, &threads) };
        self.threads = Some(threads);
        self.places.slab = Some(Arc::clone(&slab));
        Ok(Some(slab))
    }

    /// Registers the filled pages of the slab, each run of them at once if possible, until a piece is refused.
    fn register_slab(&mut self) {
        let Some(slab) = self.places.slab.clone() else { return };
        let chunk = self.options.chunk.0;
        let tensors = self.places.in_slab();
        for run in filled(&tensors).iter() {
            for whole in pieces(run, &tensors, LONGEST, LONGEST) {
                let Err(reason) = self.register_part(&slab, whole.clone()) else { continue };
                let parts = pieces(whole, &tensors, chunk, chunk.saturating_mul(STRETCH));
                tracing::debug!(%reason, parts = parts.len(), "the slab is registered in parts");
                // The same call again would be refused again.
                let refused = match parts.len() {
                    1 => Err(reason),
                    _ => parts.into_iter().try_for_each(|part| self.register_part(&slab, part)),
                };
                if let Err(reason) = refused {
                    self.report.step_down(HostLevel::Slab, HostLevel::Pageable, reason);
                    return;
                }
            }
        }
    }

    fn register_part(&mut self, slab: &Arc<Slab>, pages: Range<u64>) -> Result<()> {
        let keep: KeepAlive = Arc::<Slab>::clone(slab);
        self.places.locked.insert(self.register(pages, vec![keep])?);
        Ok(())
    }
}

/// The pages of the slab that `tensors` touch. What lies between is not registered: that would make it take memory.
fn filled(tensors: &[Range<u64>]) -> Ranges {
    let page = system::page_size();
    let mut filled = Ranges::default();
    for bytes in tensors {
        filled.insert(bytes.start / page * page..bytes.end.next_multiple_of(page));
    }
    filled
}

/// A tensor's bytes in the slab.
fn slab_bytes(slab: &Arc<Slab>, source: &SourceTensor) -> HostBytes {
    let keep: KeepAlive = Arc::<Slab>::clone(slab);
    // SAFETY: the tensor was copied to its offset in the slab, which `keep` holds and nobody writes there again.
    unsafe { HostBytes::new(slab.at(source.offset), source.bytes.size(), keep) }
}
