//! Placing a model's tensors, group by group, so that each group's sources can be dropped before the next is touched.

use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver, Registration};
use rayon::ThreadPool;

use super::check::check;
use super::in_place::{Candidate, candidates, may_stay};
use super::report::{HostLevel, Placed, StoreReport};
use super::{HostStore, Place, Places, StoreOptions, pieces};
use crate::error::Result;
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
        check(group, &self.places, self.line)?;
        let (stays, registered) = self.register_in_place(group);
        let fills = group.iter().zip(&stays).flat_map(|(source, stays)| fills(source, stays)).collect();
        // Before anything is entered, since it may fail; what was registered is then unregistered by its drop.
        self.copy_into_slab(fills)?;
        for registered in registered {
            self.places.locked.insert(registered);
        }
        for (source, stays) in group.iter().zip(stays) {
            let (id, offset, size) = (source.id, source.offset, source.bytes.size());
            let in_slab = || self.places.slab_bytes(&(offset..offset + size.0));
            let bytes = match (size, stays.is_empty()) {
                // An empty tensor must not keep the storage alive that it is a view of.
                (Bytes::ZERO, _) => Some(HostBytes::empty()),
                (_, true) => in_slab(),
                (_, false) => None,
            };
            let bytes = bytes.unwrap_or_else(|| source.bytes.clone());
            self.places.offsets.insert(id, offset);
            self.places.line.insert((offset, id), Place { id, bytes, stays });
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
        self.places.count(&mut report);
        report.registered = self.places.locked.bytes();
        report.registrations = self.places.locked.len();
        HostStore { places: self.places, report }
    }

    /// Registers the runs that may stay in place: which bytes of each tensor do, and their registrations.
    fn register_in_place(&mut self, group: &[SourceTensor]) -> (Vec<Range<u64>>, Vec<Registered>) {
        let mut stays = vec![0..0; group.len()];
        let mut registered = Vec::new();
        let tensors: Vec<Range<u64>> = group.iter().map(|source| source.bytes.range()).collect();
        if self.options.slab_only || !may_stay(&tensors, self.options.min_in_place) {
            return (stays, registered);
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
                    for &index in &candidate.members {
                        let (pages, bytes) = (&candidate.pages, &tensors[index]);
                        let (start, end) = (pages.start.max(bytes.start), pages.end.min(bytes.end));
                        stays[index] = start - bytes.start..end - bytes.start;
                    }
                    registered.extend(more);
                }
                Err(reason) => self.report.step_down(HostLevel::InPlace, HostLevel::Slab, reason),
            }
        }
        (stays, registered)
    }

    /// Registers a run of pages but those that an earlier run, of tensors that share bytes with this one's, registered.
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
        // SAFETY: whole pages of anonymous memory: of the slab, or found so in the maps. Every byte of them is one that
        // `keep` keeps alive, so none is unmapped before it is dropped.
        unsafe { Registered::new(driver, pages.start as *mut u8, size, Registration::ReadWrite, limit, keep) }
    }

    /// Copies bytes to their offsets in the slab, which is made for the first ones.
    fn copy_into_slab(&mut self, fills: Vec<Fill>) -> Result<()> {
        if fills.is_empty() {
            return Ok(());
        }
        let slab = match &self.places.slab {
            Some(slab) => Arc::clone(slab),
            None => Arc::new(Slab::new(self.line)?),
        };
        let threads = match self.threads.take() {
            Some(threads) => threads,
            None => fill_threads(self.options.threads)?,
        };
        // SAFETY: the tensors lie on the line, which the slab is as long as, and overlap neither each other nor tensors
        // placed before (`check`); nobody was given these bytes of the slab yet.
        unsafe { slab.fill(&fills, &threads) };
        self.threads = Some(threads);
        for fill in fills {
            let page = system::page_size();
            let start = slab.at(fill.offset) as u64;
            let filled = start / page * page..(start + fill.bytes.size().0).next_multiple_of(page);
            self.places.locked.missing(filled).into_iter().for_each(|pages| self.pending.insert(pages));
        }
        self.places.slab = Some(slab);
        Ok(())
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

/// What of a tensor is copied into the slab, given the bytes that stay in place.
fn fills(source: &SourceTensor, stays: &Range<u64>) -> impl Iterator<Item = Fill> {
    let edge = !stays.is_empty();
    let copied = pieces(source.bytes.size(), stays).filter(|(_, stays)| !stays);
    copied.map(move |(piece, _)| {
        let (offset, size) = (source.offset + piece.start, Bytes(piece.end - piece.start));
        Fill { offset, bytes: source.bytes.part(piece.start, size, Arc::clone(source.bytes.keep())), edge }
    })
}
