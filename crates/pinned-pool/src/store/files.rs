//! Tensors in files that are page-locked where the page cache has them.

use std::ops::Range;
use std::sync::Arc;

use gpu_driver::Bytes;
use rayon::ThreadPool;
use rayon::prelude::*;

use super::ladder::{Cut, Ladder};
use super::registrar::{Pages, Registrar};
use crate::error::{HostError, Result};
use crate::file::{FileBytes, SourceFile};
use crate::limits::memory_room;
use crate::mapped::SharedMap;
use crate::ranges::Ranges;
use crate::registered::Registered;
use crate::source::HostBytes;
use crate::watch::{Watch, Work};

/// What one thread reads into the page cache at a time, between two questions whether to go on.
const CACHED: u64 = 16 << 20;

/// The files of a store, and whether each can be locked where it is.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<(Arc<SourceFile>, Option<Arc<SharedMap>>)>);

/// What came of locking tensors in files.
#[derive(Debug, Default)]
pub(super) struct Mapped {
    /// For each tensor, where the copy engine reads it, if all of it is locked.
    pub(super) bytes: Vec<Option<HostBytes>>,
    /// Why some are not.
    pub(super) refusals: Vec<HostError>,
}

/// How tensors in files are locked.
pub(super) struct Request<'a> {
    pub(super) registrar: &'a Registrar,
    pub(super) threads: &'a ThreadPool,
    /// The shortest run that is locked.
    pub(super) shortest: Bytes,
}

impl Files {
    /// Locks what can be locked of `tensors`, those of one file that touch as one run, and adds to `registered`.
    ///
    /// # Errors
    /// If a file has changed or cannot be read, or the work was ended.
    pub(super) fn lock(
        &mut self,
        tensors: &[&FileBytes],
        ladder: &mut Ladder,
        request: &Request<'_>,
        registered: &mut Vec<Arc<Registered>>,
    ) -> Result<Mapped> {
        let mut mapped = Mapped { bytes: vec![None; tensors.len()], ..Mapped::default() };
        let mut left: Vec<usize> = (0..tensors.len()).collect();
        while let Some(&first) = left.first() {
            let file = Arc::clone(tensors[first].file());
            let (ours, others) =
                left.into_iter().partition(|&index| Arc::ptr_eq(tensors[index].file(), &file));
            left = others;
            if let Some(map) = self.map(&file, request.registrar, &mut mapped.refusals)? {
                let file = Locking { map: &map, ladder: &mut *ladder, request, registered: &mut *registered };
                file.lock(tensors, &ours, &mut mapped)?;
            }
        }
        Ok(mapped)
    }

    /// A file's mapping, if it can be locked; asked once a file.
    fn map(
        &mut self,
        file: &Arc<SourceFile>,
        registrar: &Registrar,
        refusals: &mut Vec<HostError>,
    ) -> Result<Option<Arc<SharedMap>>> {
        if let Some((_, known)) = self.0.iter().find(|(known, _)| Arc::ptr_eq(known, file)) {
            return Ok(known.clone());
        }
        let map = match SharedMap::of(file, &registrar.driver) {
            Ok(map) => Some(map),
            Err(reason @ HostError::NotMappable { .. }) => {
                refusals.push(reason);
                None
            }
            Err(error) => return Err(error),
        };
        self.0.push((Arc::clone(file), map.clone()));
        Ok(map)
    }
}

/// One file's tensors being locked.
struct Locking<'a> {
    map: &'a Arc<SharedMap>,
    ladder: &'a mut Ladder,
    request: &'a Request<'a>,
    registered: &'a mut Vec<Arc<Registered>>,
}

impl Locking<'_> {
    /// Locks tensors, given by their positions.
    fn lock(mut self, tensors: &[&FileBytes], ours: &[usize], mapped: &mut Mapped) -> Result<()> {
        let pages: Vec<Range<u64>> = ours.iter().map(|&index| self.pages(tensors[index])).collect();
        let mut wanted = Ranges::default();
        for pages in &pages {
            wanted.insert(pages.clone());
        }
        for run in wanted.iter().filter(|run| run.end - run.start >= self.request.shortest.0) {
            let before = self.registered.len();
            self.lock_run(&run, mapped)?;
            let mut locked = Ranges::default();
            for piece in &self.registered[before..] {
                locked.insert(range(piece));
            }
            let mut used = Ranges::default();
            for (&index, pages) in ours.iter().zip(&pages) {
                let whole = locked.holding(pages.start).is_some_and(|found| found.end >= pages.end);
                if whole && run.contains(&pages.start) {
                    let bytes = tensors[index];
                    mapped.bytes[index] = Some(self.map.bytes(bytes.offset(), bytes.size()));
                    used.insert(pages.clone());
                }
            }
            // What holds only a part of a tensor that goes elsewhere is of no use, and leaves its room to the next run.
            let found = self.registered.split_off(before);
            self.registered.extend(found.into_iter().filter(|piece| used.overlaps(range(piece))));
        }
        Ok(())
    }

    fn pages(&self, bytes: &FileBytes) -> Range<u64> {
        self.map.pages(&(bytes.offset()..bytes.offset() + bytes.size().0))
    }

    /// Locks what is not locked yet of a run.
    fn lock_run(&mut self, run: &Range<u64>, mapped: &mut Mapped) -> Result<()> {
        let map = self.map;
        let _turn = map.turn(&self.request.registrar.watch)?;
        let (shared, missing) = map.locked(run, &self.request.registrar.watch)?;
        self.registered.extend(shared);
        for part in missing {
            match self.lock_part(part) {
                Ok(()) => {}
                Err(reason) if is_refusal(&reason) => mapped.refusals.push(reason),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn lock_part(&mut self, part: Range<u64>) -> Result<()> {
        let asked = Bytes(part.end - part.start);
        // Pinned pages of the page cache cannot be taken back: exceeding a group's limit is a kill.
        if let Some(room) = memory_room().filter(|room| *room < asked) {
            return Err(HostError::NoRoom { asked, room });
        }
        let (map, registrar, registered) = (self.map, self.request.registrar, &mut *self.registered);
        self.ladder.lock(part, Cut::Anywhere, &mut |pages| {
            cache(map, &pages, self.request.threads, &registrar.watch)?;
            let register = |keep| {
                // SAFETY: whole pages of a mapping that is shared and read-only, and that `keep` keeps.
                unsafe { registrar.register(pages.clone(), Pages::File, keep) }
            };
            registered.push(map.lock(pages.clone(), register)?);
            Ok(())
        })
    }
}

/// Brings pages of a file into the page cache, on all threads.
fn cache(map: &Arc<SharedMap>, pages: &Range<u64>, threads: &ThreadPool, watch: &Watch) -> Result<()> {
    let parts: Vec<u64> = (pages.start..pages.end).step_by(CACHED as usize).collect();
    threads.install(|| {
        parts.par_iter().try_for_each(|&start| {
            watch.check()?;
            let part = start..(start + CACHED).min(pages.end);
            map.populate(&part)?;
            watch.report(Work::Cached, Bytes(part.end - part.start));
            Ok(())
        })
    })
}

/// Whether the next level is used instead.
fn is_refusal(reason: &HostError) -> bool {
    use HostError::{AlreadyRegistered, NoRoom, Register, RegisterLimit};
    matches!(reason, AlreadyRegistered { .. } | NoRoom { .. } | Register { .. } | RegisterLimit { .. })
}

fn range(registered: &Registered) -> Range<u64> {
    let start = registered.address() as u64;
    start..start + registered.size().0
}
