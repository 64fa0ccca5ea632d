//! Files page-locked where the page cache has them: one shared, read-only mapping a file, whoever uses it, and the page
//! ranges of it that are registered.
//!
//! ```text
//!   file          | header | tensors …                                    |      mapped once, MAP_SHARED, PROT_READ
//!   store A            [ registered ][ registered ]                              pieces of 1 GiB at most
//!   store B                     uses [ that one  ][ registered ]                 what is locked already is shared
//! ```
//!
//! **Never read from here.** The copy engine reads locked pages even if the file is cut short; the processor would be
//! killed. Host reads go through [`FileBytes::read_at`](crate::FileBytes::read_at).

use std::collections::BTreeMap;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::time::{Duration, Instant};

use gpu_driver::{Bytes, DeviceInfo, DeviceKind, Driver};

use crate::error::{HostError, Result};
use crate::file::SourceFile;
use crate::file_system;
use crate::registered::{KeepAlive, Registered};
use crate::source::HostBytes;
use crate::system;
use crate::watch::Watch;

/// The oldest branch of the kernel driver that does not mark every page dirty when it is unlocked, after which the whole
/// checkpoint would be written back …
const KERNEL_DRIVER: u32 = 570;
/// … and the CUDA version that it came with, for where the branch is not known.
const DRIVER_VERSION: u32 = 12_080;

/// How long a range that is being unlocked elsewhere is waited for: unlocking takes 10 ms a GiB.
const UNLOCKING: Duration = Duration::from_secs(5);
/// How often it is looked for.
const AGAIN: Duration = Duration::from_millis(5);

/// Whose registrations serve whom: those of CUDA serve every device of the process, an emulator's only itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Cuda,
    Host(usize),
}

impl Owner {
    fn of(driver: &Arc<dyn Driver>) -> Self {
        match driver.device_info().kind {
            DeviceKind::Cuda => Self::Cuda,
            DeviceKind::Host => Self::Host(Arc::as_ptr(driver).cast::<()>().addr()),
        }
    }
}

/// A file's shared mapping.
#[derive(Debug)]
pub(crate) struct SharedMap {
    file: Arc<SourceFile>,
    owner: Owner,
    address: NonNull<u8>,
    /// Whole pages; the last may reach beyond the file.
    size: Bytes,
    locked: Mutex<BTreeMap<u64, Piece>>,
    /// Told when a piece has been unlocked.
    unlocked: Condvar,
    turn: Mutex<()>,
}

/// The registrations in a range, and the parts of it without one.
pub(crate) type Looked = (Vec<Arc<Registered>>, Vec<Range<u64>>);

/// A registered part.
#[derive(Debug)]
struct Piece {
    end: u64,
    registered: Weak<Registered>,
}

// SAFETY: the memory is mapped read-only and never followed through this pointer; all else is `Send`.
unsafe impl Send for SharedMap {}
// SAFETY: as for `Send`; the table is behind a lock.
unsafe impl Sync for SharedMap {}

/// Every mapping that somebody holds.
static MAPS: Mutex<Vec<Weak<SharedMap>>> = Mutex::new(Vec::new());

impl SharedMap {
    /// The mapping of `file` for `driver`, made if there is none.
    ///
    /// # Errors
    /// [`HostError::NotMappable`] if the device or the file system is none that allows it, [`HostError::FileChanged`] if
    /// the file is not what it was.
    pub(crate) fn of(file: &Arc<SourceFile>, driver: &Arc<dyn Driver>) -> Result<Arc<Self>> {
        let not_mappable = |reason| HostError::NotMappable { path: file.path().to_path_buf(), reason };
        if let Some(reason) =
            device_refusal(driver.device_info()).or_else(|| file_system::refusal(file.file()))
        {
            return Err(not_mappable(reason));
        }
        file.check_unchanged()?;
        let owner = Owner::of(driver);
        let mut maps = MAPS.lock().unwrap_or_else(PoisonError::into_inner);
        maps.retain(|map| map.strong_count() > 0);
        let same = |map: &Arc<Self>| map.owner == owner && map.file.identity() == file.identity();
        if let Some(found) = maps.iter().filter_map(Weak::upgrade).find(same) {
            return Ok(found);
        }
        let size =
            file.size().checked_round_up(Bytes(system::page_size())).filter(|size| *size > Bytes::ZERO);
        let size = size.ok_or_else(|| not_mappable("it is empty".into()))?;
        let address = system::map_file(file.file(), size).map_err(|error| not_mappable(error.to_string()))?;
        let map = Arc::new(Self {
            file: Arc::clone(file),
            owner,
            address,
            size,
            locked: Mutex::default(),
            unlocked: Condvar::new(),
            turn: Mutex::default(),
        });
        maps.push(Arc::downgrade(&map));
        Ok(map)
    }

    /// The whole pages that hold the file's bytes `range`, as addresses.
    pub(crate) fn pages(&self, range: &Range<u64>) -> Range<u64> {
        let (page, start) = (system::page_size(), self.address.addr().get() as u64);
        let end = range.end.next_multiple_of(page).min(self.size.0);
        start + range.start / page * page..start + end
    }

    /// `size` of the file's bytes from `offset` on, for the copy engine alone.
    pub(crate) fn bytes(self: &Arc<Self>, offset: u64, size: Bytes) -> HostBytes {
        debug_assert!(offset + size.0 <= self.size.0, "bytes lie inside the file");
        let keep: KeepAlive = Arc::<Self>::clone(self);
        // SAFETY: mapped as long as `keep` lives, and nobody writes a checkpoint that is in use; a file that was cut short
        // is never read here by the processor, as said above and at `HostStore::runs`.
        unsafe { HostBytes::new(self.address.as_ptr().wrapping_add(offset as usize), size, keep) }
    }

    /// Brings a part of the file into the page cache and its pages into this process's tables, which locking them would do
    /// slowly and in one go.
    pub(crate) fn populate(&self, pages: &Range<u64>) -> Result<()> {
        let start = self.address.addr().get() as u64;
        debug_assert!(pages.start >= start && pages.end <= start + self.size.0, "pages of this mapping");
        // SAFETY: the range lies in this mapping.
        let populated = unsafe { system::populate(self.file.file(), pages.start - start, pages.clone()) };
        populated.or_else(|message| {
            // The file may have been cut since it was checked.
            self.file.check_unchanged()?;
            let (path, offset) = (self.file.path().to_path_buf(), pages.start - start);
            Err(HostError::FileRead { path, offset, size: Bytes(pages.end - pages.start), message })
        })
    }

    /// The registrations that lie in `pages`, and the parts of it without one, in order. Waits for those that are being
    /// given up.
    pub(crate) fn locked(&self, pages: &Range<u64>, watch: &Watch) -> Result<Looked> {
        let until = Instant::now() + UNLOCKING;
        loop {
            let (found, missing, dying) = self.look(pages);
            // Memory that could not be unregistered stays so: registering it anew is refused by its claim.
            if !dying || Instant::now() > until {
                return Ok((found, missing));
            }
            watch.check()?;
            // Outside the table's lock, since the last to let go of one takes it.
            drop(found);
            drop(self.unlocked.wait_timeout(self.table(), AGAIN));
        }
    }

    /// As [`locked`](Self::locked), at once, and whether one is being given up.
    fn look(&self, pages: &Range<u64>) -> (Vec<Arc<Registered>>, Vec<Range<u64>>, bool) {
        let table = self.table();
        let (mut found, mut missing, mut dying) = (Vec::new(), Vec::new(), false);
        let mut at = pages.start;
        let first = table.range(..=at).next_back().map_or(at, |(&start, _)| start);
        for (&start, piece) in table.range(first..pages.end.max(first)) {
            if piece.end <= at {
                continue;
            }
            if start > at {
                missing.push(at..start);
            }
            match piece.registered.upgrade() {
                Some(registered) => found.push(registered),
                None => dying = true,
            }
            at = piece.end;
        }
        if at < pages.end {
            missing.push(at..pages.end);
        }
        (found, missing, dying)
    }

    /// One store at a time looks for what is locked and locks the rest; the others wait, unless `watch` ends that.
    pub(crate) fn turn(&self, watch: &Watch) -> Result<MutexGuard<'_, ()>> {
        loop {
            match self.turn.try_lock() {
                Ok(turn) => return Ok(turn),
                Err(TryLockError::Poisoned(turn)) => return Ok(turn.into_inner()),
                Err(TryLockError::WouldBlock) => {
                    watch.check()?;
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    /// Registers whole pages of this mapping by `register`, which is given what keeps them mapped.
    pub(crate) fn lock(
        self: &Arc<Self>,
        pages: Range<u64>,
        register: impl FnOnce(Vec<KeepAlive>) -> Result<Registered>,
    ) -> Result<Arc<Registered>> {
        let end = pages.end;
        let entry = Entry { map: Arc::clone(self), start: pages.start };
        let registered = Arc::new(register(vec![Arc::new(entry)])?);
        self.table().insert(pages.start, Piece { end, registered: Arc::downgrade(&registered) });
        Ok(registered)
    }

    fn table(&self) -> MutexGuard<'_, BTreeMap<u64, Piece>> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for SharedMap {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; whoever uses its memory, registrations included, holds an `Arc` of it.
        unsafe { system::unmap(self.address, self.size) };
    }
}

/// Kept alive by a registration, so that it goes once the pages are unlocked.
#[derive(Debug)]
struct Entry {
    map: Arc<SharedMap>,
    start: u64,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut table = self.map.table();
        // Refused registrations drop their entry as well, and one in force may have the place.
        if table.get(&self.start).is_some_and(|piece| piece.registered.strong_count() == 0) {
            table.remove(&self.start);
        }
        drop(table);
        self.map.unlocked.notify_all();
    }
}

/// Why a device must not read files where the page cache has them; `None` if it may.
fn device_refusal(info: &DeviceInfo) -> Option<String> {
    if !info.read_only_registration {
        return Some("the device cannot register read-only memory".into());
    }
    if info.kind == DeviceKind::Host {
        return None;
    }
    match info.kernel_driver {
        Some(branch) if branch < KERNEL_DRIVER => Some(format!(
            "the NVIDIA driver is {branch}, and before {KERNEL_DRIVER} unlocking a file writes it back"
        )),
        None if info.driver_version < DRIVER_VERSION => Some(format!(
            "the CUDA driver is version {}, and before {DRIVER_VERSION} (570) unlocking a file writes it back",
            info.driver_version
        )),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use gpu_driver::{DeviceIdentity, DeviceOrdinal};

    use super::*;

    #[test]
    fn only_drivers_that_do_not_write_a_file_back_are_taken() {
        let info = |kind, driver_version, kernel_driver, read_only_registration| DeviceInfo {
            kind,
            identity: DeviceIdentity { kind, number: 0 },
            ordinal: DeviceOrdinal(0),
            name: "device".into(),
            total_memory: Bytes::mib(1),
            granularity: Bytes::mib(1),
            driver_version,
            kernel_driver,
            read_only_registration,
            batch_copies: true,
        };
        let (cuda, host) = (DeviceKind::Cuda, DeviceKind::Host);
        let taken = [
            info(host, 0, None, true),
            info(cuda, 13_000, Some(580), true),
            info(cuda, 12_080, None, true),
            // The library does not count where the kernel driver is known.
            info(cuda, 12_000, Some(570), true),
        ];
        for info in taken {
            assert_eq!(device_refusal(&info), None, "{info:?}");
        }
        let refused = [
            (info(host, 0, None, false), "read-only memory"),
            (info(cuda, 13_000, Some(580), false), "read-only memory"),
            (info(cuda, 13_000, Some(565), true), "driver is 565"),
            (info(cuda, 12_060, None, true), "version 12060"),
        ];
        for (info, text) in refused {
            assert!(device_refusal(&info).unwrap().contains(text), "{info:?}");
        }
    }
}
