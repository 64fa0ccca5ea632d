//! How large a ring is: by what was asked for, the device, and the memory of the machine.
#![forbid(unsafe_code)]

use gpu_driver::Bytes;

use crate::system;

/// How the staging ring of a device is made. The ring is shared: whoever needs it first decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StagingOptions {
    /// The bytes of one chunk, rounded up to whole pages. By default 8 MiB: copies of that size leave RAM at 9/10 of the
    /// full rate even one by one (47 GB/s at 4 MiB, 52.5 at 16, 55.3 in the end), and a chunk is read by one thread in
    /// less than a millisecond. Measured through rings of 128 MiB: 51.8 GB/s in chunks of 4 MiB, 53.3 in chunks of 8.
    pub chunk: Option<Bytes>,
    /// The bytes of all chunks, page-locked; at least two chunks. By default 128 MiB: a longer ring does not stay in the
    /// processor's caches (memory through 256 MiB: 46.8 GB/s, through 128: 53.3, page-locked: 55.4). Less on small devices and
    /// machines: a sixteenth of the device's memory, an eighth of what the process may have.
    pub bytes: Option<Bytes>,
    /// The most that may be page-locked in this process; by default [`memory_limit`](crate::memory_limit).
    pub register_limit: Option<Bytes>,
    /// Threads that read; by default one a core, at most 12: memory is copied at 11.5 GB/s by one, at 55 by eight, at 62
    /// by sixteen, the page cache read at 30 by eight and 38 by sixteen.
    pub threads: Option<usize>,
    /// Reads page-locked memory only: a ring whose pages are refused is then an error. By default such a ring is smaller,
    /// and in the end not page-locked.
    pub locked_only: bool,
}

const CHUNK: Bytes = Bytes::mib(8);
const RING: Bytes = Bytes::mib(128);
/// No ring is longer.
const LONGEST: Bytes = Bytes::mib(256);
const THREADS: usize = 12;
/// The fewest chunks: one is filled while another is copied.
pub(super) const FEWEST: u64 = 2;
/// Chunks of a ring that is small by default: enough that copies stay back to back.
const SMALL: u64 = 16;

/// The size of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    pub(super) chunk: Bytes,
    pub(super) slots: u64,
    pub(super) threads: usize,
}

impl StagingOptions {
    /// The ring for a device with `device` bytes of memory in a process that may have `machine`.
    pub(super) fn size(&self, device: Bytes, machine: Option<Bytes>) -> Size {
        let machine = machine.map_or(RING, |limit| Bytes(limit.0 / 8));
        let bytes = self.bytes.unwrap_or_else(|| RING.min(Bytes(device.0 / 16)).min(machine));
        let chunk = self.chunk.unwrap_or_else(|| CHUNK.min(Bytes(bytes.0 / SMALL)));
        let page = system::page_size();
        let chunk = Bytes(chunk.0.max(1).checked_next_multiple_of(page).unwrap_or(LONGEST.0).min(LONGEST.0));
        let slots = (bytes.0 / chunk.0).clamp(FEWEST, u64::from(u16::MAX));
        let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(THREADS);
        let threads = self.threads.unwrap_or_else(cores).clamp(1, slots as usize);
        Size { chunk, slots, threads }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(options: StagingOptions, device: Bytes, machine: Bytes) -> (Bytes, u64) {
        let size = options.size(device, Some(machine));
        assert!(size.threads >= 1 && size.threads as u64 <= size.slots);
        (size.chunk, size.slots)
    }

    #[test]
    fn large_machines_have_the_whole_ring_and_small_ones_less() {
        let default = StagingOptions::default();
        assert_eq!(size(default, Bytes(140 << 30), Bytes(128 << 30)), (Bytes::mib(8), 16));
        assert_eq!(size(default, Bytes(140 << 30), Bytes::mib(512)), (Bytes::mib(4), 16));
        assert_eq!(size(default, Bytes::mib(256), Bytes(64 << 30)), (Bytes::mib(1), 16));
        let (chunk, slots) = size(default, Bytes::kib(64), Bytes(1));
        assert_eq!((chunk, slots), (Bytes(system::page_size()), 2));
    }

    #[test]
    fn what_is_asked_for_is_given_in_whole_pages() {
        let page = system::page_size();
        let asked = |chunk, bytes| StagingOptions {
            chunk: Some(Bytes(chunk)),
            bytes: Some(Bytes(bytes)),
            ..StagingOptions::default()
        };
        let device = Bytes(1 << 30);
        assert_eq!(size(asked(page + 1, 9 * page), device, device), (Bytes(2 * page), 4));
        assert_eq!(size(asked(0, 0), device, device), (Bytes(page), 2));
        assert_eq!(size(asked(u64::MAX, u64::MAX), device, device).0, LONGEST);
    }
}
