//! A slab: page-aligned anonymous memory as long as the line, touched only where bytes are copied in.

use std::ops::Range;
use std::ptr::NonNull;

use gpu_driver::Bytes;
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::error::{HostError, Result};
use crate::ranges::Ranges;
use crate::source::SourceBytes;
use crate::system;
use crate::watch::{Watch, Work};

/// What one thread copies at a time: two large pages, so that no two threads first-touch the same one (pieces are cut at
/// multiples of it) and a block of a few hundred megabytes still gives every thread dozens.
const PIECE: u64 = 4 << 20;

/// Tensors on the line start at multiples of this, so that a smaller gap between two in the slab is padding.
pub(crate) const PADDING: u64 = 512;

/// More threads do not copy faster: 11.5 GB/s with one, 55 with 8, 62 with 16.
const MAX_THREADS: usize = 16;

/// Anonymous memory that takes RAM where it was written. Freed on drop.
#[derive(Debug)]
pub(crate) struct Slab {
    address: NonNull<u8>,
    size: Bytes,
}

/// Bytes and where in the slab they go.
#[derive(Debug)]
pub(crate) struct Fill<'a> {
    pub(crate) offset: u64,
    pub(crate) bytes: &'a SourceBytes,
}

// SAFETY: the memory is owned by this value and written only through `fill`, whose caller vouches for exclusion.
unsafe impl Send for Slab {}
// SAFETY: as for `Send`.
unsafe impl Sync for Slab {}

impl Slab {
    /// Maps memory for `line` bytes, rounded up to whole pages.
    pub(crate) fn new(line: Bytes) -> Result<Self> {
        let page = Bytes(system::page_size());
        let size = Bytes(line.0.max(1)).checked_round_up(page);
        let size = size.ok_or_else(|| HostError::Slab { size: line, message: "too long".into() })?;
        Ok(Self { address: system::map_anonymous(size)?, size })
    }

    /// The address of the byte at `offset`, which is inside the slab.
    pub(crate) fn at(&self, offset: u64) -> *mut u8 {
        debug_assert!(offset <= self.size.0, "an offset lies inside the slab");
        self.address.as_ptr().wrapping_add(offset as usize)
    }

    /// Copies or reads bytes in, on all threads of `pool`. Blocks until they are there.
    ///
    /// # Errors
    /// If a file cannot be read or `watch` ends the work; the targets hold anything then.
    ///
    /// # Safety
    /// Every target lies inside the slab, no two of them overlap, and nothing else reads or writes them meanwhile.
    pub(crate) unsafe fn fill(&self, fills: &[Fill<'_>], pool: &ThreadPool, watch: &Watch) -> Result<()> {
        let (mut copies, mut targets) = (Vec::new(), Ranges::default());
        for fill in fills {
            let (start, size) = (self.at(fill.offset) as u64, fill.bytes.size().0);
            // Padding belongs to what it follows, so that neighbours share large pages.
            targets.insert(start..(start + size).next_multiple_of(PADDING).min(self.at(self.size.0) as u64));
            copies.extend(
                pieces(start, start + size).map(|piece| (fill, piece.start - start, piece.end - piece.start)),
            );
        }
        for target in targets.iter() {
            // SAFETY: the targets lie inside this slab, by the caller's promise.
            unsafe { system::prefer_large_pages(target) };
        }
        pool.install(|| {
            copies.par_iter().try_for_each(|&(fill, skip, count)| {
                watch.check()?;
                let target = self.at(fill.offset + skip);
                match fill.bytes {
                    SourceBytes::Memory(bytes) => {
                        let source = bytes.address().wrapping_add(skip as usize);
                        // SAFETY: the source is readable, by the promise of `HostBytes`; the target is this piece's
                        // alone, by the caller's promise; source and slab are different memory, as the slab's is
                        // handed out only filled.
                        unsafe { std::ptr::copy_nonoverlapping(source, target, count as usize) };
                    }
                    SourceBytes::File(bytes) => {
                        // SAFETY: inside the slab and this piece's alone, as above; every byte of a new mapping is zero.
                        let target = unsafe { std::slice::from_raw_parts_mut(target, count as usize) };
                        bytes.read_at(skip, target)?;
                    }
                }
                watch.report(Work::Filled, Bytes(count));
                Ok(())
            })
        })
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own; whoever uses its memory holds an `Arc` of it.
        unsafe { system::unmap(self.address, self.size) };
    }
}

/// Threads for [`Slab::fill`]: a pool of our own, so that a process that uses rayon's is not disturbed.
pub(crate) fn fill_threads(threads: Option<usize>) -> Result<ThreadPool> {
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(MAX_THREADS);
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads.unwrap_or_else(cores).max(1))
        .thread_name(|index| format!("slab-fill-{index}"))
        .build()
        .map_err(|error| HostError::Threads { message: error.to_string() })
}

/// `start..end` cut at multiples of [`PIECE`].
fn pieces(start: u64, end: u64) -> impl Iterator<Item = Range<u64>> {
    let cuts = start / PIECE..end.div_ceil(PIECE);
    cuts.map(move |cut| (cut * PIECE).max(start)..((cut + 1) * PIECE).min(end))
        .filter(|piece| !piece.is_empty())
}
