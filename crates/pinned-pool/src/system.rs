//! All that depends on the operating system: pages, anonymous memory and the process's memory maps. Linux.

use std::ffi::c_void;
use std::ops::Range;
use std::path::Path;
use std::ptr::NonNull;

use gpu_driver::Bytes;
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

/// Gives memory back.
///
/// # Safety
/// The range is one `map_anonymous` result, and nothing uses it any more.
pub(crate) unsafe fn unmap(address: NonNull<u8>, size: Bytes) {
    // SAFETY: the caller's promise.
    if let Err(error) = unsafe { rustix::mm::munmap(address.as_ptr().cast(), size.as_usize()) } {
        tracing::error!(%error, ?address, %size, "a slab was not unmapped");
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
