//! The emulated device's memory: reservations, physical pages, and which pages are mapped where.
//!
//! ```text
//!   addresses  |  reservation: PROT_NONE …  [mapping A] [mapping B] …  [mapping A again]  |
//!   memory     |  file offset 0   pages A   pages B   (given back: a hole)   pages C …
//! ```
//!
//! Every verb checks its whole contract before it touches anything, so that misuse is an error value and not a
//! fault. File offsets are handed out once and never again (the file is sparse and a hole costs nothing), so
//! that memory never fragments: as on a device, only the number of free bytes decides.

use std::collections::{BTreeMap, HashMap};

use crate::contract::{aligned_address, power_of_two, refuse, whole_granules};
use crate::error::{DriverError, Result};
use crate::platform::{self, Backing};
use crate::types::{Access, Bytes, DeviceAddress, MemoryInfo, PageHandle};

/// Physical pages behind one handle.
#[derive(Debug)]
struct Pages {
    offset: u64,
    size: Bytes,
    mappings: u64,
    released: bool,
}

/// One mapping of a handle's pages.
#[derive(Debug, Clone, Copy)]
struct Mapping {
    size: Bytes,
    pages: PageHandle,
    access: Access,
}

/// Reserved addresses and what is mapped in them, by first address.
#[derive(Debug)]
struct Reservation {
    size: Bytes,
    mappings: BTreeMap<u64, Mapping>,
}

/// All memory of one emulated device.
#[derive(Debug)]
pub(super) struct Memory {
    backing: Backing,
    total: Bytes,
    granularity: Bytes,
    used: Bytes,
    file_end: u64,
    next_page: u64,
    pages: HashMap<PageHandle, Pages>,
    reservations: BTreeMap<u64, Reservation>,
}

/// How much of everything there is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Alive {
    pub(super) pages: u64,
    pub(super) page_bytes: Bytes,
    pub(super) mappings: u64,
    pub(super) reservations: u64,
}

impl Memory {
    pub(super) fn new(total: Bytes, granularity: Bytes) -> Result<Self> {
        Ok(Self {
            backing: Backing::new()?,
            total,
            granularity,
            used: Bytes::ZERO,
            file_end: 0,
            next_page: 1,
            pages: HashMap::new(),
            reservations: BTreeMap::new(),
        })
    }

    pub(super) fn info(&self) -> MemoryInfo {
        MemoryInfo { free: self.total - self.used, total: self.total }
    }

    pub(super) fn alive(&self) -> Alive {
        Alive {
            pages: self.pages.len() as u64,
            page_bytes: self.used,
            mappings: self.reservations.values().map(|range| range.mappings.len() as u64).sum(),
            reservations: self.reservations.len() as u64,
        }
    }

    pub(super) fn reserve(&mut self, size: Bytes, alignment: Bytes) -> Result<DeviceAddress> {
        const CALL: &str = "reserve_address";
        whole_granules(CALL, size, self.granularity)?;
        power_of_two(CALL, alignment)?;
        let address = platform::reserve(size, alignment.max(self.granularity))?;
        self.reservations.insert(address, Reservation { size, mappings: BTreeMap::new() });
        Ok(DeviceAddress(address))
    }

    pub(super) fn free(&mut self, address: DeviceAddress, size: Bytes) -> Result<()> {
        const CALL: &str = "free_address";
        match self.reservations.get(&address.0) {
            Some(range) if range.size != size => {
                return refuse(CALL, format!("{size} at {address:?}; {} are reserved there", range.size));
            }
            Some(range) if !range.mappings.is_empty() => {
                return refuse(CALL, format!("{address:?} with {} mappings in it", range.mappings.len()));
            }
            None => return refuse(CALL, format!("{address:?}, which is not the start of a reservation")),
            Some(_) => {}
        }
        // SAFETY: the range is a reservation of ours, nothing is mapped in it, and the caller of `free_address`
        // vouches that nothing uses it.
        unsafe { platform::free(address.0, size) }?;
        self.reservations.remove(&address.0);
        Ok(())
    }

    pub(super) fn create(&mut self, size: Bytes) -> Result<PageHandle> {
        whole_granules("create_pages", size, self.granularity)?;
        let MemoryInfo { free, total } = self.info();
        if size > free {
            return Err(DriverError::OutOfMemory { asked: size, free, total });
        }
        let offset = self.file_end;
        self.backing.grow(offset + size.0)?;
        self.file_end += size.0;
        self.used = self.used + size;
        let handle = PageHandle(self.next_page);
        self.next_page += 1;
        self.pages.insert(handle, Pages { offset, size, mappings: 0, released: false });
        Ok(handle)
    }

    pub(super) fn release(&mut self, handle: PageHandle) -> Result<()> {
        let Some(pages) = self.pages.get_mut(&handle).filter(|pages| !pages.released) else {
            return refuse("release_pages", format!("{handle:?}, which is not alive"));
        };
        pages.released = true;
        self.discard_unused(handle)
    }

    /// Frees pages that are released and mapped nowhere.
    fn discard_unused(&mut self, handle: PageHandle) -> Result<()> {
        let Some(pages) = self.pages.get(&handle).filter(|pages| pages.released && pages.mappings == 0)
        else {
            return Ok(());
        };
        let (offset, size) = (pages.offset, pages.size);
        // The bytes count as free even if the hole cannot be punched: the offset is never used again.
        self.used = self.used - size;
        self.pages.remove(&handle);
        self.backing.discard(offset, size)
    }

    pub(super) fn map(&mut self, address: DeviceAddress, size: Bytes, handle: PageHandle) -> Result<()> {
        const CALL: &str = "map_pages";
        let Some(pages) = self.pages.get_mut(&handle).filter(|pages| !pages.released) else {
            return refuse(CALL, format!("{handle:?}, which is not alive"));
        };
        if pages.size != size {
            return refuse(CALL, format!("{size} of a handle of {}; a handle is mapped whole", pages.size));
        }
        aligned_address(CALL, address, self.granularity)?;
        let Some((_, range)) = reservation(&mut self.reservations, address, size) else {
            return refuse(CALL, format!("{size} at {address:?}, which no reservation holds"));
        };
        if let Some((other, _)) = overlapping(&range.mappings, address, size).next() {
            return refuse(CALL, format!("{size} at {address:?}; something is mapped at {other:#x}"));
        }
        // SAFETY: the range lies in a reservation of ours and nothing is mapped there.
        unsafe { self.backing.map(address.0, pages.offset, size) }?;
        pages.mappings += 1;
        range.mappings.insert(address.0, Mapping { size, pages: handle, access: Access::None });
        Ok(())
    }

    pub(super) fn unmap(&mut self, address: DeviceAddress, size: Bytes) -> Result<()> {
        let whole = whole_mappings(&mut self.reservations, "unmap_pages", address, size)?;
        // SAFETY: the range lies in a reservation of ours; the caller of `unmap_pages` vouches that no work uses it.
        unsafe { platform::clear(address.0, size) }?;
        let mut gone = Vec::new();
        for start in whole.starts {
            gone.extend(whole.range.mappings.remove(&start).map(|mapping| mapping.pages));
        }
        let mut first_error = Ok(());
        for handle in gone {
            if let Some(pages) = self.pages.get_mut(&handle) {
                pages.mappings -= 1;
            }
            first_error = first_error.and(self.discard_unused(handle));
        }
        first_error
    }

    pub(super) fn protect(&mut self, address: DeviceAddress, size: Bytes, access: Access) -> Result<()> {
        let whole = whole_mappings(&mut self.reservations, "set_access", address, size)?;
        // SAFETY: the range lies in a reservation of ours; the caller of `set_access` vouches that no work needs
        // an access that is taken away.
        if let Err(error) = unsafe { platform::protect(address.0, size, access) } {
            for start in whole.starts {
                if let Some(mapping) = whole.range.mappings.get(&start) {
                    // SAFETY: as above; this puts back what was there, as far as the system lets us.
                    let _ = unsafe { platform::protect(start, mapping.size, mapping.access) };
                }
            }
            return Err(error);
        }
        for start in whole.starts {
            if let Some(mapping) = whole.range.mappings.get_mut(&start) {
                mapping.access = access;
            }
        }
        Ok(())
    }

    /// Refuses a range that is not mapped throughout with read and write access.
    pub(super) fn check_usable(&self, call: &'static str, address: DeviceAddress, size: Bytes) -> Result<()> {
        let end = address.0.checked_add(size.0);
        let found = self.reservations.range(..=address.0).next_back();
        let (Some(end), Some((_, range))) = (end, found) else {
            return refuse(call, format!("{size} at {address:?}, which no reservation holds"));
        };
        let mut covered = address.0;
        for (start, mapping) in overlapping(&range.mappings, address, size) {
            if start > covered {
                break;
            }
            if mapping.access != Access::ReadWrite {
                return refuse(
                    call,
                    format!("{size} at {address:?}; the mapping at {start:#x} has no access"),
                );
            }
            covered = start + mapping.size.0;
        }
        if covered < end {
            return refuse(call, format!("{size} at {address:?}; nothing is mapped at {covered:#x}"));
        }
        Ok(())
    }
}

/// All addresses go back to the system; the file's memory goes with its descriptor.
impl Drop for Memory {
    fn drop(&mut self) {
        for (address, range) in &self.reservations {
            // SAFETY: the device is gone, its threads have ended, and whoever used its addresses held it alive.
            let freed = unsafe { platform::free(*address, range.size) };
            if let Err(error) = freed {
                tracing::error!(%error, address, "an address range of a dropped emulator could not be freed");
            }
        }
    }
}

/// The reservation that holds the whole range.
fn reservation(
    all: &mut BTreeMap<u64, Reservation>,
    address: DeviceAddress,
    size: Bytes,
) -> Option<(u64, &mut Reservation)> {
    let end = address.0.checked_add(size.0)?;
    let (start, range) = all.range_mut(..=address.0).next_back()?;
    (end <= start + range.size.0).then_some((*start, range))
}

/// The mappings that share a byte with the range, in address order.
fn overlapping(
    mappings: &BTreeMap<u64, Mapping>,
    address: DeviceAddress,
    size: Bytes,
) -> impl Iterator<Item = (u64, Mapping)> {
    let before = mappings.range(..address.0).next_back();
    let from = before.map_or(address.0, |(start, _)| *start);
    mappings
        .range(from..address.0.saturating_add(size.0))
        .map(|(start, mapping)| (*start, *mapping))
        .filter(move |(start, mapping)| start + mapping.size.0 > address.0)
}

/// A range that begins and ends where mappings do, with no gap.
struct Whole<'a> {
    range: &'a mut Reservation,
    starts: Vec<u64>,
}

/// Refuses a range with a gap or a part of a mapping.
fn whole_mappings<'a>(
    all: &'a mut BTreeMap<u64, Reservation>,
    call: &'static str,
    address: DeviceAddress,
    size: Bytes,
) -> Result<Whole<'a>> {
    let Some((_, range)) = reservation(all, address, size).filter(|_| size != Bytes::ZERO) else {
        return refuse(call, format!("{size} at {address:?}, which no reservation holds"));
    };
    let mut covered = address.0;
    let mut starts = Vec::new();
    for (start, mapping) in overlapping(&range.mappings, address, size) {
        if start != covered {
            break;
        }
        covered = start + mapping.size.0;
        starts.push(start);
    }
    if covered != address.0 + size.0 {
        return refuse(
            call,
            format!("{size} at {address:?}; that is not a run of whole mappings (it breaks at {covered:#x})"),
        );
    }
    Ok(Whole { range, starts })
}
