//! The end of a range's use while tensors over it still live: nothing, or poison, behind their addresses.

use std::sync::Arc;

use crate::error::{Result, VmmError};
use crate::page::{Page, PagePool};
use crate::space::{AddressSpace, twice};
use crate::table::Table;

/// The byte that retired addresses read as: a NaN in every floating-point format.
const POISON: u8 = 0xFF;

impl AddressSpace {
    /// Takes every page away and refuses new ones; the addresses stay reserved while anyone holds this range. See
    /// "Device work". Does nothing if the range is retired already.
    ///
    /// # Errors
    /// If the driver refuses; the range is as before then.
    pub fn retire(&self) -> Result<()> {
        let mut table = self.lock();
        self.retire_in(&mut table)
    }

    /// As [`retire`](Self::retire), and then lets every address read one page of 0xFF, taken from `pool` after
    /// this range's own pages went back: for ranges whose leases are still held. Blocks until the page is filled. See
    /// "Device work".
    ///
    /// # Errors
    /// If the driver refuses, or the pool has no room for one page (someone else holds this range's pages). The error
    /// of a range that [`is_retired`](Self::is_retired) afterwards means that it is retired without poison.
    pub fn retire_to_poison(&self, pool: &PagePool) -> Result<()> {
        let mut table = self.lock();
        table.expect_live()?;
        if pool.granule() != self.granule() || !pool.is_of(self.driver()) {
            return Err(VmmError::ForeignPage { page: pool.granule(), granule: self.granule() });
        }
        self.retire_in(&mut table)?;
        let page = pool.take(1)?;
        let pages: Vec<_> = page.iter().cycle().take(table.whole().len()).cloned().collect();
        self.map_into(&mut table, 0, &pages)?;
        self.poison_first_granule()
    }

    /// As [`retire`](Self::retire), and then lets every address read `page`, made by [`poison_page`], so that ranges that end
    /// together, or for a while, share one. See "Device work".
    ///
    /// # Errors
    /// If the driver refuses. The error of a range that [`is_retired`](Self::is_retired) afterwards means that it is retired
    /// without poison.
    pub fn retire_to(&self, page: &Arc<Page>) -> Result<()> {
        let mut table = self.lock();
        table.expect_live()?;
        if page.size() != self.granule() || !page.is_of(self.driver()) {
            return Err(VmmError::ForeignPage { page: page.size(), granule: self.granule() });
        }
        self.retire_in(&mut table)?;
        self.map_into(&mut table, 0, &vec![Arc::clone(page); self.granules() as usize + 1])
    }

    /// Whether the range was retired.
    pub fn is_retired(&self) -> bool {
        self.lock().retired
    }

    fn retire_in(&self, table: &mut Table) -> Result<()> {
        if !table.retired {
            self.unmap_from(table, table.whole())?;
            table.retired = true;
        }
        Ok(())
    }

    /// All granules alias one page, so filling the first fills them all.
    fn poison_first_granule(&self) -> Result<()> {
        let driver = &self.window.driver;
        let stream = driver.create_stream()?;
        // SAFETY: the first granule is mapped for writing and stays so: the table's lock is held until the stream was
        // waited for; a retired range has no other writer.
        let filled = unsafe { driver.fill(self.address(), self.granule(), POISON, stream) };
        // If this fails the stream may hold work, and is left alone.
        twice(|| driver.synchronize_stream(stream))?;
        let destroy = || {
            // SAFETY: the stream was made above, is destroyed once, and has just been waited for.
            unsafe { driver.destroy_stream(stream) }
        };
        if let Err(cause) = twice(destroy) {
            tracing::error!(%cause, ?stream, "a stream was not destroyed");
        }
        Ok(filled?)
    }
}

/// A page of `pool` in which every byte is 0xFF, a NaN in every floating-point format, for whatever should not be read any
/// more. Blocks until it is filled.
///
/// # Errors
/// If the pool has no room for a page or the driver refuses. Nothing is held then.
pub fn poison_page(pool: &PagePool) -> Result<Arc<Page>> {
    let page = pool.take(1)?.remove(0);
    let window = AddressSpace::reserve(Arc::clone(pool.driver()), pool.granule(), 1)?;
    window.map(0, std::slice::from_ref(&page))?;
    window.poison_first_granule()?;
    Ok(page)
}
