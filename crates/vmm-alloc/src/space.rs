//! The reserved range of a model: addresses that never change over pages that do.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpu_driver::{Access, Bytes, DeviceAddress, Driver, DriverError};

use crate::error::{Result, UndoFailure, VmmError};
use crate::page::{Page, check_granule};
use crate::table::{Slot, Table, access_runs};
use crate::window::Window;

/// One reservation of device addresses, cut in granules, and the page behind each of them.
///
/// ```text
///   granule   |  0  |  1  |  2  |  3  | tail |
///   page         A     B     R     R     A       R stands behind two granules: an alias
/// ```
///
/// One granule more than asked for is reserved behind the range: the *tail*. An alias of any page there
/// ([`set_tail`](Self::set_tail)) makes kernels harmless that read a little past the last tensor.
///
/// **Leases.** Every tensor made over the range holds an `Arc` of it, so that its addresses are not given to anyone
/// else while it lives. Whoever ends the range's use calls [`retire`](Self::retire) (no leases left) or
/// [`retire_to_poison`](Self::retire_to_poison) (a stray read then gives NaN, not a fault); the reservation itself
/// goes with the last lease.
///
/// **Drop order.** Mappings are taken away, then pages are released, then the addresses are freed. What the driver
/// refuses to unmap is leaked with an error in the log, pages included, since freeing its addresses would be worse.
///
/// **Device work.** `unmap`, `remap`, `set_access` with [`Access::None`], `retire`, `retire_to_poison` and drop do not
/// wait for the device. Wait (on an event or a stream) for submitted work that uses these granules before; otherwise that
/// work faults, which ends the device context, or this process on the emulator.
///
/// All methods may be called from any thread; they take effect one after the other.
pub struct AddressSpace {
    pub(crate) window: Window,
    granules: usize,
    /// Grows whenever a granule may have become unusable, so that a check can be skipped while it stands still.
    epoch: AtomicU64,
    table: Mutex<Table>,
}

/// A moment's view of an [`AddressSpace`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SpaceReport {
    /// Where the range begins.
    pub address: DeviceAddress,
    /// Its size without the tail.
    pub size: Bytes,
    /// The size of one granule.
    pub granule: Bytes,
    /// Granules with a page, the tail included.
    pub mapped: u32,
    /// Granules shut by the guard mode.
    pub guarded: u32,
    /// Different pages behind them.
    pub pages: u32,
    /// Whether the range was retired.
    pub retired: bool,
}

impl AddressSpace {
    /// Reserves `granules` granules of `granule` bytes, and the tail. Costs no memory.
    pub fn reserve(driver: Arc<dyn Driver>, granule: Bytes, granules: u32) -> Result<Arc<Self>> {
        check_granule(&*driver, granule)?;
        let with_tail = u64::from(granules) + 1;
        let size = granule.0.checked_mul(with_tail).filter(|_| granules > 0);
        let size = size.ok_or(VmmError::Size { granules, granule })?;
        // A power of two that every granule start is a multiple of, large enough for the driver to use large pages.
        let alignment = Bytes(1 << granule.0.trailing_zeros());
        let address = driver.reserve_address(Bytes(size), alignment)?;
        Ok(Arc::new(Self {
            window: Window { driver, address, granule },
            granules: granules as usize,
            epoch: AtomicU64::new(0),
            table: Mutex::new(Table::new(with_tail as usize)),
        }))
    }

    /// Where the range begins.
    pub fn address(&self) -> DeviceAddress {
        self.window.address
    }

    /// The size of the range without the tail.
    pub fn size(&self) -> Bytes {
        self.window.bytes(self.granules)
    }

    /// The size of one granule.
    pub fn granule(&self) -> Bytes {
        self.window.granule
    }

    /// How many granules there are, without the tail.
    pub fn granules(&self) -> u32 {
        self.granules as u32
    }

    /// The driver this range is of.
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.window.driver
    }

    /// Puts one page behind each granule from `first` on, for reading and writing. The same page may stand behind
    /// several granules. The driver sets the access once for the whole run.
    ///
    /// # Errors
    /// If a granule is mapped already or the driver refuses; nothing is mapped then.
    pub fn map(&self, first: u32, pages: &[Arc<Page>]) -> Result<()> {
        let range = self.range(first, pages.len())?;
        self.check_pages(pages)?;
        let mut table = self.lock();
        table.expect_live()?;
        table.expect_unmapped(range.clone())?;
        self.map_into(&mut table, range.start, pages)
    }

    /// Takes the pages of `count` granules from `first` on away, one driver call a run; granules without a page are
    /// skipped. See "Device work".
    ///
    /// # Errors
    /// If the driver refuses; every granule is mapped as before then.
    pub fn unmap(&self, first: u32, count: u32) -> Result<()> {
        let range = self.range(first, count as usize)?;
        let mut table = self.lock();
        table.expect_live()?;
        self.unmap_from(&mut table, range)
    }

    /// Puts other pages behind granules, whatever was there before. See "Device work".
    ///
    /// # Errors
    /// If the driver refuses; every granule is mapped as before then.
    pub fn remap(&self, first: u32, pages: &[Arc<Page>]) -> Result<()> {
        let range = self.range(first, pages.len())?;
        self.check_pages(pages)?;
        let mut table = self.lock();
        table.expect_live()?;
        self.remap_in(&mut table, range, pages)
    }

    /// Puts an alias of `page` behind the tail, in place of an earlier one. The tail holds the page like any mapping.
    pub fn set_tail(&self, page: &Arc<Page>) -> Result<()> {
        let pages = std::slice::from_ref(page);
        self.check_pages(pages)?;
        let mut table = self.lock();
        table.expect_live()?;
        self.remap_in(&mut table, self.granules..self.granules + 1, pages)
    }

    /// Shuts mapped granules to the device, or opens them again: the guard mode. See "Device work".
    pub fn set_access(&self, first: u32, count: u32, access: Access) -> Result<()> {
        let range = self.range(first, count as usize)?;
        let mut table = self.lock();
        table.expect_live()?;
        table.expect_mapped(range.clone())?;
        if range.is_empty() {
            return Ok(());
        }
        self.window.set_access(range.clone(), access)?;
        if access == Access::None {
            self.forget_checks();
        }
        table.set_access(range, access);
        Ok(())
    }

    /// The page behind a granule.
    pub fn page(&self, granule: u32) -> Option<Arc<Page>> {
        self.lock().get(granule as usize).map(|slot| Arc::clone(&slot.page))
    }

    /// The address of `bytes` bytes at `offset`, all of which are mapped and open, in a range that was not retired.
    pub fn writable(&self, offset: u64, bytes: Bytes) -> Result<DeviceAddress> {
        let end = offset.saturating_add(bytes.0);
        if end > self.size().0 {
            return Err(VmmError::OutOfBounds { offset, end, size: self.size() });
        }
        let granule = self.granule().0;
        let table = self.lock();
        table.expect_live()?;
        if bytes > Bytes::ZERO {
            table.expect_writable((offset / granule) as usize..end.div_ceil(granule) as usize)?;
        }
        Ok(self.address().offset(Bytes(offset)))
    }

    /// A number that changes whenever a granule may have become unusable: what [`writable`](Self::writable) allowed at
    /// an epoch stays allowed while the epoch is the same.
    pub fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Acquire)
    }

    /// The range in numbers.
    pub fn report(&self) -> SpaceReport {
        let table = self.lock();
        let slots: Vec<&Slot> = table.whole().filter_map(|granule| table.get(granule)).collect();
        let mut handles: Vec<u64> = slots.iter().map(|slot| slot.page.handle().0).collect();
        handles.sort_unstable();
        handles.dedup();
        SpaceReport {
            address: self.address(),
            size: self.size(),
            granule: self.granule(),
            mapped: slots.len() as u32,
            guarded: slots.iter().filter(|slot| slot.access == Access::None).count() as u32,
            pages: handles.len() as u32,
            retired: table.retired,
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Table> {
        // The table changes only after the driver did, in steps that do not panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn range(&self, first: u32, count: usize) -> Result<Range<usize>> {
        let range = first as usize..first as usize + count;
        if range.end > self.granules {
            let (first, end) = (u64::from(first), range.end as u64);
            return Err(VmmError::OutOfRange { first, end, granules: self.granules() });
        }
        Ok(range)
    }

    pub(crate) fn check_pages(&self, pages: &[Arc<Page>]) -> Result<()> {
        match pages.iter().find(|page| page.size() != self.granule() || !page.is_of(&self.window.driver)) {
            Some(page) => Err(VmmError::ForeignPage { page: page.size(), granule: self.granule() }),
            None => Ok(()),
        }
    }

    fn forget_checks(&self) {
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Maps free granules; on an error they are free again, or shut if even that failed.
    pub(crate) fn map_into(&self, table: &mut Table, first: usize, pages: &[Arc<Page>]) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        match self.window.map(first, pages, Access::ReadWrite) {
            Ok(()) => {
                table.put(first, pages, Access::ReadWrite);
                Ok(())
            }
            Err(failure) => match failure.left {
                None => Err(failure.cause.into()),
                Some((left, undo)) => {
                    // They are mapped, so their pages must live on and the table must say so.
                    table.put(first, &pages[..left], Access::None);
                    let (first, end) = (first as u32, (first + left) as u32);
                    Err(UndoFailure { cause: failure.cause, undo, first, end }.into())
                }
            },
        }
    }

    /// Unmaps what is mapped in `range`; on an error it is mapped again.
    pub(crate) fn unmap_from(&self, table: &mut Table, range: Range<usize>) -> Result<()> {
        self.forget_checks();
        let runs = table.mapped_runs(range.clone());
        for (index, run) in runs.iter().enumerate() {
            if let Err(cause) = self.window.unmap(run.clone()) {
                let mut outcome = Err(cause.clone().into());
                for undone in &runs[..index] {
                    let slots = table.copy(undone.clone());
                    table.clear(undone.clone());
                    if let Err(failure) = self.put_back(table, undone.start, &slots, &cause) {
                        outcome = Err(failure);
                    }
                }
                return outcome;
            }
        }
        table.clear(range);
        Ok(())
    }

    fn remap_in(&self, table: &mut Table, range: Range<usize>, pages: &[Arc<Page>]) -> Result<()> {
        let before = table.copy(range.clone());
        self.unmap_from(table, range.clone())?;
        let mapped = self.map_into(table, range.start, pages);
        if let Err(VmmError::Driver(cause)) = &mapped {
            self.put_back(table, range.start, &before, cause)?;
        }
        mapped
    }

    /// Maps slots again that were unmapped a moment ago, with the access they had: as many as the driver lets.
    fn put_back(
        &self,
        table: &mut Table,
        first: usize,
        slots: &[Option<Slot>],
        cause: &DriverError,
    ) -> Result<()> {
        let mut outcome = Ok(());
        for run in access_runs(slots) {
            let pages: Vec<_> =
                slots[run.clone()].iter().flatten().map(|slot| Arc::clone(&slot.page)).collect();
            let access = slots[run.start].as_ref().map_or(Access::ReadWrite, |slot| slot.access);
            let (start, end) = (first + run.start, first + run.end);
            match self.window.map(start, &pages, access) {
                Ok(()) => table.put(start, &pages, access),
                Err(failure) => {
                    if let Some((left, _)) = failure.left {
                        table.put(start, &pages[..left], Access::None);
                    }
                    let (cause, undo) = (cause.clone(), failure.cause);
                    outcome = Err(UndoFailure { cause, undo, first: start as u32, end: end as u32 }.into());
                }
            }
        }
        outcome
    }
}

/// A refusal to give something back may pass, and what is not given back is lost for the life of the process.
pub(crate) fn twice<E>(act: impl Fn() -> Result<(), E>) -> Result<(), E> {
    act().or_else(|_| act())
}

impl fmt::Debug for AddressSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.report().fmt(f)
    }
}

impl Drop for AddressSpace {
    fn drop(&mut self) {
        let table = self.table.get_mut().unwrap_or_else(PoisonError::into_inner);
        for run in table.mapped_runs(table.whole()) {
            if let Err(cause) = twice(|| self.window.unmap(run.clone())) {
                tracing::error!(%cause, address = ?self.window.address, "an address range was not unmapped and is lost");
                // Mapped memory is held whatever is released, so its pages keep counting against their pool's limit.
                std::mem::forget(table.copy(table.whole()));
                return;
            }
        }
        table.clear(table.whole());
        let size = self.window.bytes(self.granules + 1);
        let free = || {
            // SAFETY: address and size are those of the one reservation made in `reserve`, everything in it was
            // unmapped above, and nobody holds the range any more.
            unsafe { self.window.driver.free_address(self.window.address, size) }
        };
        if let Err(cause) = twice(free) {
            tracing::error!(%cause, address = ?self.window.address, %size, "an address range was not freed");
        }
    }
}
