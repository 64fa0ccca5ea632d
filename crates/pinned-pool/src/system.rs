//! All that depends on the operating system: pages, anonymous memory, mapped files and the process's memory maps.
//! Linux.

use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;

use gpu_driver::Bytes;
use rustix::fs::{AtFlags, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{HostError, Result};

/// The size of a large page on x86-64 and on arm64 with 4 KiB pages; a wrong guess only loses speed.
const LARGE_PAGE: u64 = 2 << 20;

/// Where the machine's memory is told.
pub(crate) const MEMORY_INFO: &str = "/proc/meminfo";
/// Where the process's control groups are told.
pub(crate) const CONTROL_GROUPS: &str = "/proc/self/cgroup";
/// Where control groups are.
pub(crate) const CONTROL_GROUP_ROOT: &str = "/sys/fs/cgroup";

/// A small file's text, if there is one.
pub(crate) fn read_text(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok()
}

/// The size of a page of memory.
pub(crate) fn page_size() -> u64 {
    rustix::param::page_size() as u64
}

/// The memory maps of this process as the system writes them.
pub(crate) fn read_maps() -> Result<String> {
    std::fs::read_to_string("/proc/self/maps").map_err(|error| HostError::Maps { message: error.to_string() })
}

/// Maps `size` bytes of zeroed memory that takes no RAM until it is touched; `size` is whole pages and not zero.
pub(crate) fn map_anonymous(size: Bytes) -> Result<NonNull<u8>> {
    let refused = |message: String| HostError::Slab { size, message };
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // NORESERVE: a line has holes where tensors stay in place, and they must not count as promised memory.
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the system's choice touches no existing memory.
    let mapped =
        unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), size.as_usize(), protection, flags) };
    let address = mapped.map_err(|error| refused(error.to_string()))?;
    NonNull::new(address.cast()).ok_or_else(|| refused("the system gave a null address".into()))
}

/// Maps a file's first `size` bytes, whole pages, shared and read-only.
pub(crate) fn map_file(file: &File, size: Bytes) -> io::Result<NonNull<u8>> {
    let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the system's choice touches no existing memory.
    let mapped =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), size.as_usize(), protection, flags, file, 0) }?;
    NonNull::new(mapped.cast()).ok_or_else(|| io::Error::other("the system gave a null address"))
}

/// Reads the part of a file that is mapped at `pages` into the page cache and this process's page tables; a kernel
/// that cannot (before 5.14) only reads. The text says what failed.
///
/// # Safety
/// The pages are mapped from `file`, from `offset` on.
pub(crate) unsafe fn populate(file: &File, offset: u64, pages: Range<u64>) -> Result<(), String> {
    let size = pages.end - pages.start;
    // All of it is asked for at once, since faults alone read 128 KiB at a time.
    if let Err(error) = rustix::fs::fadvise(file, offset, NonZeroU64::new(size), rustix::fs::Advice::WillNeed)
    {
        tracing::debug!(%error, "reading ahead is not available");
    }
    let address = std::ptr::without_provenance_mut(pages.start as usize);
    // SAFETY: the caller's promise; the advice changes no content, and pages beyond the file's end are an error here.
    match unsafe { rustix::mm::madvise(address, size as usize, Advice::LinuxPopulateRead) } {
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(Errno::FAULT) => Err("the file was cut short".into()),
        Err(error) => Err(error.to_string()),
    }
}

/// The number of a file's file system, and whether the file is mapped without the page cache.
pub(crate) fn file_system(file: &File) -> io::Result<(u64, bool)> {
    let number = rustix::fs::fstatfs(file)?.f_type.cast_unsigned();
    let found = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::empty());
    let dax = found.is_ok_and(|found| found.stx_attributes.contains(StatxAttributes::DAX));
    Ok((number, dax))
}

/// Gives memory back.
///
/// # Safety
/// The range is one result of a function above, and nothing uses it any more.
pub(crate) unsafe fn unmap(address: NonNull<u8>, size: Bytes) {
    // SAFETY: the caller's promise.
    if let Err(error) = unsafe { rustix::mm::munmap(address.as_ptr().cast(), size.as_usize()) } {
        tracing::error!(%error, ?address, %size, "memory was not unmapped");
    }
}

/// Asks for large pages in the whole large pages inside `range`, and only there, so that no byte outside the range comes
/// to take memory. First touch is several times faster with them.
///
/// # Safety
/// The range is mapped anonymous memory.
pub(crate) unsafe fn prefer_large_pages(range: Range<u64>) {
    let (start, end) = (range.start.next_multiple_of(LARGE_PAGE), range.end / LARGE_PAGE * LARGE_PAGE);
    if start < end {
        let address = start as *mut c_void;
        // SAFETY: the caller's promise; the advice changes no content.
        let advised = unsafe { rustix::mm::madvise(address, (end - start) as usize, Advice::LinuxHugepage) };
        if let Err(error) = advised {
            tracing::debug!(%error, "large pages are not available");
        }
    }
}
