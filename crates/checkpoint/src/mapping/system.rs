//! What is asked of the operating system about memory: private mappings, advice, what lies in the page cache. Each call
//! is safe as it stands here.
#![expect(unsafe_code, reason = "this is where the crate speaks to the memory manager")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

use memmap2::{MmapMut, MmapOptions};
use rustix::mm::Advice;

/// The number of `cachestat` on every architecture. Linux 6.5 and later.
const CACHESTAT: libc::c_long = 451;

/// The size of a page of memory.
pub(crate) fn page_size() -> usize {
    rustix::param::page_size()
}

/// Maps the first `size` bytes of a file privately: what is written goes to copies of the pages, which are not counted
/// as promised memory before.
///
/// Nothing here reads the mapping. Whoever does must know that a file cut meanwhile ends the process.
pub(crate) fn map_private(file: &File, size: usize) -> io::Result<MmapMut> {
    let mut options = MmapOptions::new();
    options.len(size).no_reserve_swap();
    // SAFETY: the mapping is only handed on as an address; no reference to bytes that others may change is ever made.
    unsafe { options.map_copy(file) }
}

/// Asks for huge pages behind memory that is about to be filled: each first write then prepares 2 MiB and not 4 KiB.
/// Advice: a refusal changes nothing.
pub(crate) fn advise_huge(target: &mut [u8]) {
    let page = page_size();
    // Whole pages around the memory: an allocation of its own stays one area instead of being cut into three.
    let before = target.as_ptr().addr() % page;
    let start = target.as_mut_ptr().wrapping_sub(before);
    let size = (before + target.len()).next_multiple_of(page);
    // SAFETY: this advice leaves the content of every page as it is, whoever owns it.
    let advised = unsafe { rustix::mm::madvise(start.cast(), size, Advice::LinuxHugepage) };
    if let Err(error) = advised {
        tracing::trace!(%error, size, "huge pages are not to be had");
    }
}

/// Has the pages of memory that is about to be filled made ready at once, and not one by one as the bytes come. Reading a
/// GiB out of the page cache took 0.33 s of a core either way where huge pages lay ready, 0.5 s with small pages; where
/// huge pages had to be found, 0.3 to 0.4 s this way and 0.6 to 0.9 s the other. Linux 5.14 and later; elsewhere nothing
/// happens.
pub(crate) fn populate(target: &mut [u8]) {
    let page = page_size();
    // Whole pages within: a neighbour's page stays as it is.
    let before = target.as_ptr().addr().wrapping_neg() % page;
    let Some(size) = target.len().checked_sub(before).map(|rest| rest / page * page).filter(|size| *size > 0)
    else {
        return;
    };
    let start = target.as_mut_ptr().wrapping_add(before);
    // SAFETY: this advice leaves the content of every page as it is, and all pages are the target's own.
    let advised = unsafe { rustix::mm::madvise(start.cast(), size, Advice::LinuxPopulateWrite) };
    if let Err(error) = advised {
        tracing::trace!(%error, size, "pages are not made ready ahead");
    }
}

#[repr(C)]
struct CachestatRange {
    offset: u64,
    size: u64,
}

#[repr(C)]
#[derive(Default)]
struct Cachestat {
    cached: u64,
    dirty: u64,
    writeback: u64,
    evicted: u64,
    recently_evicted: u64,
}

/// How many pages of `size` bytes at `offset` lie in the page cache.
pub(crate) fn cached_pages(file: &File, offset: u64, size: u64) -> io::Result<u64> {
    let range = CachestatRange { offset, size };
    let mut found = Cachestat::default();
    // SAFETY: both structs are laid out as the kernel's and live across the call, and the file is open.
    let result = unsafe {
        libc::syscall(CACHESTAT, file.as_raw_fd(), &raw const range, &raw mut found, 0 as libc::c_uint)
    };
    if result == 0 { Ok(found.cached) } else { Err(io::Error::last_os_error()) }
}
