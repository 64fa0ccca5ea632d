//! How a store places tensors, and what it may lock.
#![forbid(unsafe_code)]

use gpu_driver::Bytes;

/// Which ways of page-locking a store may use. What none of them takes stays where its owner has it, and is streamed from
/// there through a staging ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Levels {
    /// Files, where the page cache has them: no copy, no second RAM, shared by processes.
    pub mapped: bool,
    /// Large anonymous memory, where its owner has it.
    pub in_place: bool,
    /// Copies in memory of the store's own.
    pub slab: bool,
}

impl Levels {
    /// Every level.
    pub const ALL: Self = Self { mapped: true, in_place: true, slab: true };
    /// Nothing is page-locked.
    pub const NONE: Self = Self { mapped: false, in_place: false, slab: false };
}

impl Default for Levels {
    fn default() -> Self {
        Self::ALL
    }
}

/// How a [`HostStore`](crate::HostStore) places tensors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreOptions {
    /// Which ways of page-locking are allowed.
    pub levels: Levels,
    /// Copy every tensor into the slab, as if none could stay where it is.
    pub slab_only: bool,
    /// The shortest run of pages that is registered where it lies, and the size from which a tensor counts as having its
    /// pages to itself. By default 32 MiB: glibc's threshold for giving an allocation a mapping of its own moves, but
    /// never beyond `DEFAULT_MMAP_THRESHOLD_MAX`, 4·1024·1024·`sizeof(long)` (mallopt(3), `M_MMAP_THRESHOLD`). Smaller
    /// allocations may share pages with others, whose copies the driver would refuse.
    pub min_in_place: Bytes,
    /// The shortest run of a file's pages that is registered where the page cache has it; shorter ones go to the slab. By
    /// default 1 MiB: a registration costs tens of microseconds, and a copy of a piece that short goes at half the rate.
    pub min_mapped: Bytes,
    /// The size of the pieces in which memory is registered, between which the work can be ended. By default 1 GiB, which
    /// takes 30 to 40 ms. Pieces of the slab are up to four times as long so that no tensor is cut.
    pub piece: Bytes,
    /// The size of the pieces where such a piece is refused; then a quarter and a sixteenth of it.
    pub chunk: Bytes,
    /// The most that may be page-locked in this process; beyond it, bytes stay pageable. By default
    /// [`memory_limit`](crate::memory_limit).
    pub register_limit: Option<Bytes>,
    /// Threads that copy into the slab; by default one a core, at most 16.
    pub threads: Option<usize>,
}

impl StoreOptions {
    /// The levels that are allowed in the end.
    pub(super) fn allowed(&self) -> Levels {
        if self.slab_only {
            return Levels { mapped: false, in_place: false, ..self.levels };
        }
        self.levels
    }
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            levels: Levels::ALL,
            slab_only: false,
            min_in_place: Bytes::mib(32),
            min_mapped: Bytes::mib(1),
            piece: Bytes::mib(1024),
            chunk: Bytes::mib(256),
            register_limit: None,
            threads: None,
        }
    }
}
