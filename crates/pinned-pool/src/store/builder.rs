//! Placing a model's tensors, group by group, so that each group's sources can be dropped before the next is touched.

use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver, Registration};
use rayon::ThreadPool;

use super::in_place::{Candidate, candidates, may_stay};
use super::report::{HostLevel, Placed, StoreReport};
use super::{HostStore, Place, Places, StoreOptions};
use crate::error::{HostError, Result};
use crate::limits::memory_limit;
use crate::maps::HostMaps;
use crate::ranges::Ranges;
use crate::registered::{KeepAlive, Registered};
use crate::slab::{Fill, Slab, fill_threads};
use crate::source::{HostBytes, SourceTensor};
use crate::system;

/// The most that is registered in one call, so that a refusal does not cost a whole model its speed.
const MAX_REGISTRATION: u64 = 1 << 30;

/// A [`HostStore`] being filled.
#[derive(Debug)]
pub struct HostStoreBuilder {
    driver: Arc<dyn Driver>,
    line: Bytes,
    options: StoreOptions,
    places: Places,
    report: StoreReport,
    /// Pages of the slab that were filled and not registered, by address.
    pending: Ranges,
    /// The slab was refused once and is not tried again.
    slab_refused: bool,
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
            pending: Ranges::default(),
            slab_refused: false,
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
        self.check(group)?;
        let (kept, registered) = self.register_in_place(group);
        let is_copied =
            |index: usize, source: &SourceTensor| !kept[index] && source.bytes.size() > Bytes::ZERO;
        let copied = group.iter().enumerate().filter(|(index, source)| is_copied(*index, source));
        let copied: Vec<&SourceTensor> = copied.map(|(_, source)| source).collect();
        // Before anything is entered, since it may fail; what was registered is then unregistered by its drop.
        let slab = self.copy_into_slab(&copied)?;
        for registered in registered {
            self.places.locked.insert(registered);
        }
        for (source, &in_place) in group.iter().zip(&kept) {
            let bytes = match &slab {
                // An empty tensor must not keep the storage alive that it is a view of.
                _ if source.bytes.size() == Bytes::ZERO => HostBytes::empty(),
                Some(slab) if !in_place => slab_bytes(slab, source),
                _ => source.bytes.clone(),
            };
            self.places.offsets.insert(source.id, source.offset);
            self.places
                .line
                .insert((source.offset, source.id), Place { id: source.id, bytes, stays: in_place });
        }
        if self.pending.total() >= self.options.chunk.0 {
            self.register_slab();
        }
        let places = group.iter().filter_map(|source| self.places.get(source.id));
        Ok(places.map(|place| self.places.placed(place)).collect())
    }

    /// Registers what is left of the slab and ends placing.
    pub fn finish(mut self) -> HostStore {
        self.register_slab();
        let mut report = self.report;
        for place in self.places.line.values() {
            let total = match self.places.placed(place).level {
                HostLevel::InPlace => &mut report.in_place,
                HostLevel::Slab => &mut report.slab,
                HostLevel::Pageable => &mut report.pageable,
            };
            *total = *total + place.bytes.size();
        }
        report.registered = self.places.locked.bytes();
        report.registrations = self.places.locked.len();
        HostStore { places: self.places, report }
    }

    /// Every tensor on the line, once, and no two overlapping.
    fn check(&self, group: &[SourceTensor]) -> Result<()> {
        let mut spans: Vec<(u64, u64, u32)> = Vec::with_capacity(group.len());
        for source in group {
            let (id, offset) = (source.id, source.offset);
            let end = offset.saturating_add(source.bytes.size().0);
            if end > self.line.0 {
                return Err(HostError::OutsideLine { id, offset, end, line: self.line });
            }
            if self.places.offsets.contains_key(&id) {
                return Err(HostError::PlacedTwice { id });
            }
            if offset < end {
                spans.push((offset, end, id));
                // No two placed tensors overlap, so only the last one that begins before `end` can reach here.
                if let Some((at, place)) = self.places.last_before(end)
                    && at + place.bytes.size().0 > offset
                {
                    return Err(HostError::Overlap { first: place.id, second: id });
                }
            }
        }
        let mut ids: Vec<u32> = group.iter().map(|source| source.id).collect();
        ids.sort_unstable();
        if let Some(pair) = ids.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(HostError::PlacedTwice { id: pair[0] });
        }
        spans.sort_unstable();
        match spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
            Some(pair) => Err(HostError::Overlap { first: pair[0].2, second: pair[1].2 }),
            None => Ok(()),
        }
    }

    /// Registers the runs that may stay in place: which tensors do, and their registrations.
    fn register_in_place(&mut self, group: &[SourceTensor]) -> (Vec<bool>, Vec<Registered>) {
        let mut kept = vec![false; group.len()];
        let mut registered = Vec::new();
        let tensors: Vec<Range<u64>> = group.iter().map(|source| source.bytes.range()).collect();
        if self.options.slab_only || !may_stay(&tensors, self.options.min_in_place) {
            return (kept, registered);
        }
        // Read anew for every group: memory that was freed since may have become a file mapping.
        let found = HostMaps::read().map(|maps| candidates(&tensors, &maps, self.options.min_in_place));
        let found = found.unwrap_or_else(|reason| {
            self.report.step_down(HostLevel::InPlace, HostLevel::Slab, reason);
            Vec::new()
        });
        for candidate in found {
            match self.register_run(group, &candidate) {
                Ok(more) => {
                    candidate.members.iter().for_each(|&index| kept[index] = true);
                    registered.extend(more);
                }
                Err(reason) => self.report.step_down(HostLevel::InPlace, HostLevel::Slab, reason),
            }
        }
        (kept, registered)
    }

    /// Registers a run of pages but those that an earlier group's run registered already.
    fn register_run(&self, group: &[SourceTensor], run: &Candidate) -> Result<Vec<Registered>> {
        let keep = || run.members.iter().map(|&index| Arc::clone(group[index].bytes.keep())).collect();
        self.places
            .locked
            .missing(run.pages.clone())
            .into_iter()
            .map(|pages| self.register(pages, keep()))
            .collect()
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
    fn copy_into_slab(&mut self, sources: &[&SourceTensor]) -> Result<Option<Arc<Slab>>> {
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
        let fills: Vec<Fill<'_>> =
            sources.iter().map(|source| Fill { offset: source.offset, bytes: &source.bytes }).collect();
        // SAFETY: the tensors lie on the line, which the slab is as long as, and overlap neither each other nor tensors
        // placed before (`check`); nobody was given these bytes of the slab yet.
        unsafe { slab.fill(&fills, &threads) };
        self.threads = Some(threads);
        for source in sources {
            let page = system::page_size();
            let start = slab.at(source.offset) as u64;
            let filled = start / page * page..(start + source.bytes.size().0).next_multiple_of(page);
            self.places.locked.missing(filled).into_iter().for_each(|pages| self.pending.insert(pages));
        }
        self.places.slab = Some(Arc::clone(&slab));
        Ok(Some(slab))
    }

    /// Registers the filled pages of the slab, until one call is refused.
    fn register_slab(&mut self) {
        let Some(slab) = &self.places.slab else { return };
        let runs: Vec<Range<u64>> = std::mem::take(&mut self.pending).iter().collect();
        for run in runs {
            for start in run.clone().step_by(MAX_REGISTRATION as usize) {
                if self.slab_refused {
                    return;
                }
                let keep: KeepAlive = Arc::<Slab>::clone(slab);
                match self.register(start..run.end.min(start + MAX_REGISTRATION), vec![keep]) {
                    Ok(registered) => self.places.locked.insert(registered),
                    Err(reason) => {
                        self.slab_refused = true;
                        self.report.step_down(HostLevel::Slab, HostLevel::Pageable, reason);
                    }
                }
            }
        }
    }
}

/// A tensor's bytes in the slab.
fn slab_bytes(slab: &Arc<Slab>, source: &SourceTensor) -> HostBytes {
    let keep: KeepAlive = Arc::<Slab>::clone(slab);
    // SAFETY: the tensor was copied to its offset in the slab, which `keep` holds and nobody writes there again.
    unsafe { HostBytes::new(slab.at(source.offset), source.bytes.size(), keep) }
}
