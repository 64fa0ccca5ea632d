//! Placing a model's tensors, group by group, so that each group's sources can be dropped before the next is touched.

use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver};
use rayon::ThreadPool;

use super::check::check;
use super::files::{Files, Mapped, Request};
use super::in_place::{Candidate, candidates, may_stay};
use super::ladder::{Cut, Ladder};
use super::registrar::{Pages, Registrar};
use super::report::{HostLevel, Placed, StoreReport};
use super::slab_lock::SlabLock;
use super::{Home, HostStore, Levels, Place, Places, StoreOptions};
use crate::error::{HostError, Result};
use crate::file::FileBytes;
use crate::limits::{memory_limit, memory_room};
use crate::maps::HostMaps;
use crate::registered::{KeepAlive, Registered};
use crate::release;
use crate::slab::{Fill, Slab, fill_threads};
use crate::source::{HostBytes, SourceBytes, SourceTensor};
use crate::watch::Watch;

/// A [`HostStore`] being filled.
///
/// Dropped after the work was ended by its [`Watch`], it gives memory back on a thread of its own, so that its caller goes on
/// at once.
#[derive(Debug)]
pub struct HostStoreBuilder {
    line: Bytes,
    options: StoreOptions,
    levels: Levels,
    registrar: Registrar,
    places: Places,
    files: Files,
    /// How tensors are registered where they are.
    ladder: Ladder,
    slab: SlabLock,
    report: StoreReport,
    threads: Option<Arc<ThreadPool>>,
    /// The registrations of the group that is being placed.
    pending: Vec<Arc<Registered>>,
    cancelled: bool,
}

/// What happens to each tensor of a group.
struct Group<'a> {
    sources: &'a [SourceTensor],
    homes: Vec<Option<Home>>,
}

impl HostStoreBuilder {
    pub(super) fn new(driver: Arc<dyn Driver>, line: Bytes, options: StoreOptions) -> Self {
        let limit = options.register_limit.or_else(memory_limit);
        let registrar = Registrar { driver, limit, watch: Watch::new() };
        let ladder = || Ladder::new(options.piece, options.chunk);
        Self {
            line,
            levels: options.allowed(),
            slab: SlabLock::new(registrar.clone(), ladder(), options.piece),
            ladder: ladder(),
            registrar,
            places: Places::default(),
            files: Files::default(),
            report: StoreReport::default(),
            threads: None,
            pending: Vec::new(),
            cancelled: false,
            options,
        }
    }

    /// Has the work followed, and ended if its caller wishes. To be called before anything is placed.
    pub fn watch(&mut self, watch: Watch) -> &mut Self {
        self.registrar.watch = watch;
        // Made anew, with the watch.
        drop(self.take_slab());
        self
    }

    /// Places a group of tensors, such as a block's. When it returns, the bytes of those that were copied
    /// ([`Placed::is_copied`]) are no longer needed where they came from: drop their sources before the next group, and RAM
    /// never holds more than the model and one group.
    ///
    /// # Errors
    /// If a tensor lies outside the line, overlaps another or was placed before, if a file has changed or cannot be read, if
    /// there is no memory for the slab, or if the work was ended. No tensor of the group is placed then. A refused
    /// registration is no error: the next level is used, and the report says why.
    pub fn place(&mut self, group: &[SourceTensor]) -> Result<Vec<Placed>> {
        let placed = self.place_group(group);
        match placed {
            // What was registered goes with the builder, on a thread of its own.
            Err(HostError::Cancelled) => self.cancelled = true,
            _ => self.pending.clear(),
        }
        placed
    }

    /// Registers the rest of the slab and ends placing.
    ///
    /// # Errors
    /// If the work was ended. A refused registration is no error: what is not page-locked stays pageable.
    pub fn finish(mut self) -> Result<HostStore> {
        let slab = self.take_slab();
        let (registered, refusal) = slab.finish(self.places.slab.as_ref());
        for registered in registered {
            self.places.locked.insert(registered);
        }
        match refusal {
            Some(HostError::Cancelled) => {
                self.cancelled = true;
                return Err(HostError::Cancelled);
            }
            Some(reason) => self.report.step_down(HostLevel::Slab, HostLevel::Pageable, reason),
            None => {}
        }
        let (places, mut report) = (std::mem::take(&mut self.places), std::mem::take(&mut self.report));
        report.count(&places);
        Ok(HostStore { places, report })
    }

    fn place_group(&mut self, sources: &[SourceTensor]) -> Result<Vec<Placed>> {
        self.registrar.watch.check()?;
        release::wait(&self.registrar.watch)?;
        check(sources, &self.places, self.line)?;
        let mut group = Group { sources, homes: vec![None; sources.len()] };
        self.lock_in_place(&mut group)?;
        self.lock_files(&mut group)?;
        let slab = self.copy_into_slab(&mut group)?;
        // Nothing fails from here on.
        for registered in self.pending.drain(..) {
            self.places.locked.insert(registered);
        }
        for (source, home) in sources.iter().zip(group.homes) {
            let (bytes, home) = match (home, &slab) {
                // An empty tensor must not keep the storage alive that it is a view of.
                _ if source.bytes.size() == Bytes::ZERO => (HostBytes::empty().into(), Home::Slab),
                (Some(Home::Slab), Some(slab)) => (slab_bytes(slab, source).into(), Home::Slab),
                (home, _) => (source.bytes.clone(), home.unwrap_or(Home::Owner)),
            };
            self.places.insert(source.offset, Place { id: source.id, bytes, home });
        }
        let places = sources.iter().filter_map(|source| self.places.get(source.id));
        Ok(places.map(|place| self.places.placed(place)).collect())
    }

    /// Registers the runs that may stay in place.
    fn lock_in_place(&mut self, group: &mut Group<'_>) -> Result<()> {
        let range = |source: &SourceTensor| match &source.bytes {
            SourceBytes::Memory(bytes) if source.lock => bytes.range(),
            _ => 0..0,
        };
        let tensors: Vec<Range<u64>> = group.sources.iter().map(range).collect();
        for (index, bytes) in tensors.iter().enumerate() {
            // What is a view of bytes in place stays as they do.
            if !bytes.is_empty() && self.places.locked.holds_whole(bytes.clone()) {
                group.homes[index] = Some(Home::Owner);
            }
        }
        if !self.levels.in_place || !may_stay(&tensors, self.options.min_in_place) {
            return Ok(());
        }
        // Read anew for every group: memory that was freed since may have become a file mapping.
        let found = HostMaps::read()
            .map(|maps| candidates(&tensors, &maps, &self.places.locked, self.options.min_in_place));
        let found = found.unwrap_or_else(|reason| {
            self.report.step_down(HostLevel::InPlace, HostLevel::Slab, reason);
            Vec::new()
        });
        for candidate in found {
            match self.lock_run(&candidate, &tensors, group) {
                Err(HostError::Cancelled) => return Err(HostError::Cancelled),
                Err(reason) => self.report.step_down(HostLevel::InPlace, HostLevel::Slab, reason),
                Ok(()) => {}
            }
        }
        Ok(())
    }

    /// Registers one run in place; what of it was registered before a refusal stays so.
    fn lock_run(&mut self, run: &Candidate, tensors: &[Range<u64>], group: &mut Group<'_>) -> Result<()> {
        let mut whole: Vec<Range<u64>> = run.members.iter().map(|&index| tensors[index].clone()).collect();
        whole.sort_unstable_by_key(|bytes| bytes.start);
        let whole = merged(whole);
        let (registrar, homes, registered) = (&self.registrar, &mut group.homes, &mut self.pending);
        let sources = group.sources;
        self.ladder.lock(run.pages.clone(), Cut::Whole(&whole), &mut |pages| {
            let inside = |index: &&usize| pages.contains(&tensors[**index].start);
            let members: Vec<usize> = run.members.iter().filter(inside).copied().collect();
            let keep = members.iter().filter_map(|&index| sources[index].bytes.memory());
            let keep: Vec<KeepAlive> = keep.map(|bytes| Arc::clone(bytes.keep())).collect();
            // SAFETY: whole pages of anonymous memory, found so in the maps. Each page holds bytes that `keep` keeps alive,
            // so none is unmapped before it is dropped.
            let locked = unsafe { registrar.register(pages.clone(), Pages::Memory, keep) }?;
            registered.push(Arc::new(locked));
            for index in members {
                homes[index] = Some(Home::Owner);
            }
            Ok(())
        })
    }

    /// Locks the tensors in files where the page cache has them.
    fn lock_files(&mut self, group: &mut Group<'_>) -> Result<()> {
        if !self.levels.mapped {
            return Ok(());
        }
        let wanted = |(index, source): (usize, &SourceTensor)| {
            let bytes = source.bytes.file().filter(|bytes| source.lock && bytes.size() > Bytes::ZERO)?;
            Some((index, bytes.clone()))
        };
        let wanted: Vec<(usize, FileBytes)> = group.sources.iter().enumerate().filter_map(wanted).collect();
        if wanted.is_empty() {
            return Ok(());
        }
        let threads = self.threads()?;
        let tensors: Vec<&FileBytes> = wanted.iter().map(|(_, bytes)| bytes).collect();
        let request =
            Request { registrar: &self.registrar, threads: &threads, shortest: self.options.min_mapped };
        let Mapped { bytes, refusals } =
            self.files.lock(&tensors, &mut self.ladder, &request, &mut self.pending)?;
        for ((index, _), bytes) in wanted.iter().zip(bytes) {
            group.homes[*index] = bytes.map(Home::Mapped);
        }
        let next = if self.levels.slab { HostLevel::Slab } else { HostLevel::File };
        for reason in refusals {
            self.report.step_down(HostLevel::Mapped, next, reason);
        }
        Ok(())
    }

    /// Copies what is wanted locked and has no home yet into the slab, which is made for the first one.
    fn copy_into_slab(&mut self, group: &mut Group<'_>) -> Result<Option<Arc<Slab>>> {
        let chosen = self.choose_for_slab(group);
        if chosen.is_empty() {
            return Ok(self.places.slab.clone());
        }
        let slab = match &self.places.slab {
            Some(slab) => Arc::clone(slab),
            None => Arc::new(Slab::new(self.line)?),
        };
        let threads = self.threads()?;
        // A piece at a time, so that one can be registered while the next is filled.
        let mut batch: Vec<Fill<'_>> = Vec::new();
        let mut left = chosen.len();
        for &index in &chosen {
            let source = &group.sources[index];
            batch.push(Fill { offset: source.offset, bytes: &source.bytes });
            left -= 1;
            let size: Bytes = batch.iter().map(|fill| fill.bytes.size()).sum();
            if left > 0 && size < self.options.piece {
                continue;
            }
            // SAFETY: the tensors lie on the line, which the slab is as long as, and overlap neither each other nor tensors
            // placed before (`check`); nobody was given these bytes of the slab yet.
            unsafe { slab.fill(&batch, &threads, &self.registrar.watch) }?;
            let range = |fill: Fill<'_>| {
                let start = slab.at(fill.offset) as u64;
                start..start + fill.bytes.size().0
            };
            self.slab.filled(&slab, batch.drain(..).map(range));
        }
        for index in chosen {
            group.homes[index] = Some(Home::Slab);
        }
        self.places.slab = Some(Arc::clone(&slab));
        Ok(Some(slab))
    }

    /// Which tensors go to the slab, by offset: as many as the limit and the memory allow.
    fn choose_for_slab(&mut self, group: &Group<'_>) -> Vec<usize> {
        let waits = |index: &usize| {
            let source = &group.sources[*index];
            group.homes[*index].is_none() && source.lock && source.bytes.size() > Bytes::ZERO
        };
        let mut chosen: Vec<usize> = (0..group.sources.len()).filter(waits).collect();
        if !self.levels.slab || self.slab.is_refused() {
            return Vec::new();
        }
        chosen.sort_unstable_by_key(|&index| group.sources[index].offset);
        let mut room = if chosen.is_empty() { None } else { memory_room() };
        chosen.retain(|&index| {
            let source = &group.sources[index];
            let bytes = source.offset..source.offset + source.bytes.size().0;
            let more = self.slab.more(&bytes);
            let fits = match room {
                Some(room) if more > room => Err(HostError::NoRoom { asked: more, room }),
                _ => self.slab.promise(&bytes, self.registrar.limit),
            };
            if let Err(reason) = fits {
                self.report.step_down(HostLevel::Slab, unlocked(&source.bytes), reason);
                return false;
            }
            room = room.map(|room| room - more);
            true
        });
        chosen
    }

    /// The slab's registrations, in whose place new ones come.
    fn take_slab(&mut self) -> SlabLock {
        let ladder = Ladder::new(self.options.piece, self.options.chunk);
        let new = SlabLock::new(self.registrar.clone(), ladder, self.options.piece);
        std::mem::replace(&mut self.slab, new)
    }

    fn threads(&mut self) -> Result<Arc<ThreadPool>> {
        if let Some(threads) = &self.threads {
            return Ok(Arc::clone(threads));
        }
        let threads = Arc::new(fill_threads(self.options.threads)?);
        self.threads = Some(Arc::clone(&threads));
        Ok(threads)
    }
}

impl Drop for HostStoreBuilder {
    fn drop(&mut self) {
        if !self.cancelled {
            return;
        }
        // Unlocking takes 10 ms a GiB and freeing more; whoever ended the work wants to go on.
        let (slab, places, pending) =
            (self.take_slab(), std::mem::take(&mut self.places), std::mem::take(&mut self.pending));
        release::behind(move || {
            slab.abandon();
            drop((places, pending));
        });
    }
}

/// What a tensor is that is not page-locked.
fn unlocked(bytes: &SourceBytes) -> HostLevel {
    match bytes {
        SourceBytes::Memory(_) => HostLevel::Pageable,
        SourceBytes::File(_) => HostLevel::File,
    }
}

/// Ranges in order, those that overlap as one.
fn merged(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut merged: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match merged.last_mut() {
            Some(last) if range.start < last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// A tensor's bytes in the slab.
fn slab_bytes(slab: &Arc<Slab>, source: &SourceTensor) -> HostBytes {
    let keep: KeepAlive = Arc::<Slab>::clone(slab);
    // SAFETY: the tensor was copied to its offset in the slab, which `keep` holds and nobody writes there again.
    unsafe { HostBytes::new(slab.at(source.offset), source.bytes.size(), keep) }
}
