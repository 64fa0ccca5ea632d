//! What depends on the operating system: the CUDA driver library's name, and for the emulator one file of
//! anonymous memory whose parts can be mapped at many addresses, with inaccessible address ranges to map them
//! into. Linux; another system replaces this module alone.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::ptr;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap, mmap_anonymous, mprotect, munmap};

use crate::error::{DriverError, Result};
use crate::types::{Access, Bytes};

/// Where the CUDA driver is looked for. The versioned name first: it is what the NVIDIA driver installs, while the
/// plain one may be a toolkit's link stub.
pub(crate) const CUDA_LIBRARIES: &[&str] = &["libcuda.so.1", "libcuda.so"];

/// Where the NVIDIA kernel driver tells its version, as `580.65.06`.
const KERNEL_DRIVER: &str = "/sys/module/nvidia/version";

/// The branch of the NVIDIA kernel driver, if there is one.
pub(crate) fn kernel_driver() -> Option<u32> {
    branch(&std::fs::read_to_string(KERNEL_DRIVER).ok()?)
}

/// The number before the first point.
fn branch(version: &str) -> Option<u32> {
    version.trim().split('.').next()?.parse().ok()
}

/// The operating system's page.
pub(crate) fn page_size() -> Bytes {
    Bytes(rustix::param::page_size() as u64)
}

fn failed(call: &'static str) -> impl Fn(Errno) -> DriverError {
    move |errno| DriverError::System { call, message: errno.to_string() }
}

/// The emulated device's physical memory: sparse, so that an unwritten byte costs nothing.
#[derive(Debug)]
pub(crate) struct Backing {
    file: OwnedFd,
}

impl Backing {
    /// An empty memory.
    pub(crate) fn new() -> Result<Self> {
        let file = memfd_create("gpu-driver-host", MemfdFlags::CLOEXEC).map_err(failed("memfd_create"))?;
        Ok(Self { file })
    }

    /// Makes the first `size` bytes usable.
    pub(crate) fn grow(&self, size: u64) -> Result<()> {
        ftruncate(&self.file, size).map_err(failed("ftruncate"))
    }

    /// Gives the memory behind an interval back to the system.
    pub(crate) fn discard(&self, offset: u64, size: Bytes) -> Result<()> {
        fallocate(&self.file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, size.0)
            .map_err(failed("fallocate"))
    }

    /// Maps an interval at `address`, inaccessible, in place of what is mapped there.
    ///
    /// # Safety
    /// `address..address + size` lies in a range of [`reserve`] that nothing else uses.
    pub(crate) unsafe fn map(&self, address: u64, offset: u64, size: Bytes) -> Result<()> {
        let at = ptr::without_provenance_mut(address as usize);
        // SAFETY: the caller vouches that the replaced range is a part of a reservation and unused.
        unsafe {
            mmap(
                at,
                size.as_usize(),
                ProtFlags::empty(),
                MapFlags::SHARED | MapFlags::FIXED,
                &self.file,
                offset,
            )
        }
        .map_err(failed("mmap"))?;
        Ok(())
    }
}

/// Finds `size` bytes of inaccessible addresses aligned to `alignment`, a power of two no less than a page.
pub(crate) fn reserve(size: Bytes, alignment: Bytes) -> Result<u64> {
    let Some(padded) = size.0.checked_add(alignment.0) else {
        return Err(failed("mmap")(Errno::NOMEM));
    };
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at an address of the system's choice disturbs nothing.
    let start = unsafe { mmap_anonymous(ptr::null_mut(), padded as usize, ProtFlags::empty(), flags) }
        .map_err(failed("mmap"))?
        .addr() as u64;
    let aligned = start.next_multiple_of(alignment.0);
    let end = start + padded;
    for (from, to) in [(start, aligned), (aligned + size.0, end)] {
        if from < to {
            // SAFETY: the part lies in the mapping made just above, outside the aligned range that is handed out.
            unsafe { free(from, Bytes(to - from)) }?;
        }
    }
    Ok(aligned)
}

/// Makes a part of a reservation inaccessible and empty again.
///
/// # Safety
/// The range lies in a range of [`reserve`], and what is mapped there is not used any more.
pub(crate) unsafe fn clear(address: u64, size: Bytes) -> Result<()> {
    let at = ptr::without_provenance_mut(address as usize);
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the caller vouches that the replaced range is a part of a reservation and unused.
    unsafe { mmap_anonymous(at, size.as_usize(), ProtFlags::empty(), flags) }.map_err(failed("mmap"))?;
    Ok(())
}

/// Sets what may be done at a mapped range.
///
/// # Safety
/// The range lies in a range of [`reserve`]; taking access away needs that nothing uses it.
pub(crate) unsafe fn protect(address: u64, size: Bytes, access: Access) -> Result<()> {
    let at = ptr::without_provenance_mut(address as usize);
    let flags = match access {
        Access::None => MprotectFlags::empty(),
        Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
    };
    // SAFETY: the caller vouches that the range is a part of a reservation.
    unsafe { mprotect(at, size.as_usize(), flags) }.map_err(failed("mprotect"))
}

/// The memory maps of this process, if the system tells them.
pub(crate) fn memory_maps() -> Option<String> {
    std::fs::read_to_string("/proc/self/maps").ok()
}

/// Copies memory of this process that may be a file's, through the kernel, which stops where a plain read would end the
/// process because the file was cut short: how many bytes there were. A system without `/proc/self/mem` has the plain
/// read's risk.
pub(crate) fn read_guarded(address: usize, target: &mut [u8]) -> usize {
    let Ok(memory) = File::open("/proc/self/mem") else {
        let source: *const u8 = ptr::with_exposed_provenance(address);
        // SAFETY: the submitter of the copy vouches that the range is readable until it has run.
        unsafe { ptr::copy(source, target.as_mut_ptr(), target.len()) };
        return target.len();
    };
    let mut done = 0;
    while done < target.len() {
        match memory.read_at(&mut target[done..], (address + done) as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    done
}

/// Gives addresses back to the system.
///
/// # Safety
/// The range is one of [`reserve`], or a part of it, and nothing uses it.
pub(crate) unsafe fn free(address: u64, size: Bytes) -> Result<()> {
    let at = ptr::without_provenance_mut(address as usize);
    // SAFETY: the caller vouches that the range is a reservation's and unused.
    unsafe { munmap(at, size.as_usize()) }.map_err(failed("munmap"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_branch_is_the_number_before_the_first_point() {
        assert_eq!(branch("580.65.06\n"), Some(580));
        assert_eq!(branch("595"), Some(595));
        for text in ["", ".1", "x.1", "-5.1", "99999999999.0"] {
            assert_eq!(branch(text), None, "{text:?}");
        }
    }
}
