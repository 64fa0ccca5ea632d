//! The driver calls behind a reserved range: runs of granules mapped, unmapped and opened, each call undone if the
//! next one fails. Which granule holds what is the table's business, not this file's.

use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Access, Bytes, DeviceAddress, Driver, DriverError};

use crate::page::Page;

/// A reserved range of addresses in granules.
#[derive(Debug)]
pub(crate) struct Window {
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) address: DeviceAddress,
    pub(crate) granule: Bytes,
}

/// A mapping that failed, and whether some of it could not be taken back.
#[derive(Debug)]
pub(crate) struct MapFailure {
    pub(crate) cause: DriverError,
    /// How many pages from the first are mapped all the same, and why they could not be unmapped.
    pub(crate) left: Option<(usize, DriverError)>,
}

impl Window {
    pub(crate) fn at(&self, granule: usize) -> DeviceAddress {
        self.address.offset(self.bytes(granule))
    }

    pub(crate) fn bytes(&self, granules: usize) -> Bytes {
        Bytes(self.granule.0 * granules as u64)
    }

    /// Maps one page a granule from `first` on and sets the access of all of them in one call. The caller, which
    /// holds the table's lock, has checked that the granules lie in the range and are free.
    pub(crate) fn map(
        &self,
        first: usize,
        pages: &[Arc<Page>],
        access: Access,
    ) -> Result<(), Box<MapFailure>> {
        for (index, page) in pages.iter().enumerate() {
            // SAFETY: the caller's check; the page is alive, as its `Arc` is borrowed here.
            let mapped =
                unsafe { self.driver.map_pages(self.at(first + index), self.granule, page.handle()) };
            if let Err(cause) = mapped {
                return Err(self.undo_map(first, index, cause));
            }
        }
        self.set_access(first..first + pages.len(), access)
            .map_err(|cause| self.undo_map(first, pages.len(), cause))
    }

    fn undo_map(&self, first: usize, mapped: usize, cause: DriverError) -> Box<MapFailure> {
        let undone = if mapped == 0 { Ok(()) } else { self.unmap(first..first + mapped) };
        Box::new(MapFailure { cause, left: undone.err().map(|undo| (mapped, undo)) })
    }

    /// Takes a run of mapped granules away in one call.
    pub(crate) fn unmap(&self, run: Range<usize>) -> Result<(), DriverError> {
        let (address, size) = (self.at(run.start), self.bytes(run.len()));
        // SAFETY: the run is mapped throughout with pages of one granule each, so only whole mappings are covered;
        // that no submitted work uses it is the documented duty of whoever unmaps (`AddressSpace`, "Device work").
        unsafe { self.driver.unmap_pages(address, size) }
    }

    /// Sets the access of a run of mapped granules in one call.
    pub(crate) fn set_access(&self, run: Range<usize>, access: Access) -> Result<(), DriverError> {
        let (address, size) = (self.at(run.start), self.bytes(run.len()));
        // SAFETY: the run is mapped throughout; that no submitted work uses it when it is shut is the documented duty
        // of whoever shuts it (`AddressSpace`, "Device work").
        unsafe { self.driver.set_access(address, size, access) }
    }
}
