//! Host bytes by address, each with what keeps them alive: what comes in, where it lives, and what is copied.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use gpu_driver::Bytes;

use crate::error::{HostError, Result};
use crate::file::FileBytes;
use crate::registered::KeepAlive;

/// A tensor's bytes as its owner hands them over, and their place on the line of device addresses.
#[derive(Clone)]
pub struct SourceTensor {
    pub(crate) id: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: SourceBytes,
    pub(crate) lock: bool,
}

/// Where bytes are: in memory, or in a file that is read when they are needed.
#[derive(Clone)]
pub enum SourceBytes {
    /// In memory.
    Memory(HostBytes),
    /// In a file.
    File(FileBytes),
}

/// Bytes in host memory and what keeps them alive.
#[derive(Clone)]
pub struct HostBytes {
    address: *const u8,
    size: Bytes,
    keep: KeepAlive,
}

/// Host bytes that are copied in one piece to `offset` of the line of device addresses.
#[derive(Clone)]
pub struct HostRun {
    pub(crate) offset: u64,
    pub(crate) bytes: HostBytes,
}

/// A stretch of the line of device addresses, and how its bytes get there.
#[derive(Clone)]
pub enum LineRun {
    /// Page-locked: the copy engine reads it where it is.
    Locked(HostRun),
    /// Not page-locked: read into a staging ring and copied on from there.
    Staged {
        /// Where on the line the bytes go.
        offset: u64,
        /// The bytes.
        bytes: SourceBytes,
    },
}

// SAFETY: shared, read-only bytes of any thread by the promise of `HostBytes::new`; the keep-alive is `Send + Sync`.
unsafe impl Send for HostBytes {}
// SAFETY: as for `Send`.
unsafe impl Sync for HostBytes {}

impl HostBytes {
    /// `size` bytes at `address`, alive as long as `keep`.
    ///
    /// # Safety
    /// Until the last clone of `keep` is dropped, the bytes are readable from any thread and nobody writes them while
    /// they are read. `keep` may be dropped on any thread.
    pub unsafe fn new(address: *const u8, size: Bytes, keep: KeepAlive) -> Self {
        Self { address, size, keep }
    }

    /// The bytes of a shared owner, such as `Arc<Vec<u8>>`.
    pub fn of<T: AsRef<[u8]> + Send + Sync + 'static>(owner: &Arc<T>) -> Self {
        let bytes: &[u8] = T::as_ref(owner);
        let (address, size) = (bytes.as_ptr(), Bytes(bytes.len() as u64));
        // SAFETY: the slice borrows from the value inside the `Arc`, which neither moves nor is borrowed mutably while a
        // clone of the `Arc` exists; `keep` is such a clone.
        unsafe { Self::new(address, size, Arc::<T>::clone(owner)) }
    }

    /// No bytes, which keep nothing alive.
    pub fn empty() -> Self {
        Self { address: std::ptr::dangling(), size: Bytes::ZERO, keep: Arc::new(()) }
    }

    /// Where they begin.
    pub fn address(&self) -> *const u8 {
        self.address
    }

    /// How many there are.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// What keeps them alive: a holder of a clone may use the address.
    pub fn keep(&self) -> &KeepAlive {
        &self.keep
    }

    /// The bytes themselves.
    pub fn as_slice(&self) -> &[u8] {
        if self.size == Bytes::ZERO {
            return &[];
        }
        // SAFETY: readable and not written while `keep` lives, by the promise of `new`; borrowed from `self`, which
        // holds `keep`.
        unsafe { std::slice::from_raw_parts(self.address, self.size.as_usize()) }
    }

    /// The address range.
    pub(crate) fn range(&self) -> Range<u64> {
        self.address as u64..self.address as u64 + self.size.0
    }

    /// `size` bytes from `skip` on, kept alive by `keep`. The caller has checked the bounds and that `keep` keeps them.
    pub(crate) fn part(&self, skip: u64, size: Bytes, keep: KeepAlive) -> Self {
        debug_assert!(skip + size.0 <= self.size.0, "a part lies inside its whole");
        Self { address: self.address.wrapping_add(skip as usize), size, keep }
    }
}

impl fmt::Debug for HostBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {:p}", self.size, self.address)
    }
}

impl SourceBytes {
    /// How many there are.
    pub fn size(&self) -> Bytes {
        match self {
            Self::Memory(bytes) => bytes.size(),
            Self::File(bytes) => bytes.size(),
        }
    }

    /// Those in memory.
    pub fn memory(&self) -> Option<&HostBytes> {
        match self {
            Self::Memory(bytes) => Some(bytes),
            Self::File(_) => None,
        }
    }

    /// Those in a file.
    pub fn file(&self) -> Option<&FileBytes> {
        match self {
            Self::Memory(_) => None,
            Self::File(bytes) => Some(bytes),
        }
    }

    /// Reads bytes from `skip` on until `target` is full: a copy from memory, `pread` from a file.
    ///
    /// # Errors
    /// If there are not so many, or if the file cannot be read; `target` holds anything then.
    pub fn read_at(&self, skip: u64, target: &mut [u8]) -> Result<()> {
        match self {
            Self::Memory(bytes) => {
                let end = skip.saturating_add(target.len() as u64);
                let found = bytes.as_slice().get(skip as usize..end as usize);
                let found =
                    found.ok_or(HostError::OutsideMemory { offset: skip, end, size: bytes.size() })?;
                target.copy_from_slice(found);
                Ok(())
            }
            Self::File(bytes) => bytes.read_at(skip, target),
        }
    }

    /// `size` bytes from `skip` on.
    ///
    /// # Errors
    /// If there are not so many.
    pub fn part(&self, skip: u64, size: Bytes) -> Result<Self> {
        let end = skip.saturating_add(size.0);
        if end > self.size().0 {
            return Err(HostError::OutsideMemory { offset: skip, end, size: self.size() });
        }
        Ok(match self {
            Self::Memory(bytes) => Self::Memory(bytes.part(skip, size, Arc::clone(bytes.keep()))),
            Self::File(bytes) => Self::File(bytes.part(skip, size)),
        })
    }
}

impl From<HostBytes> for SourceBytes {
    fn from(bytes: HostBytes) -> Self {
        Self::Memory(bytes)
    }
}

impl From<FileBytes> for SourceBytes {
    fn from(bytes: FileBytes) -> Self {
        Self::File(bytes)
    }
}

impl fmt::Debug for SourceBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(bytes) => bytes.fmt(f),
            Self::File(bytes) => bytes.fmt(f),
        }
    }
}

impl LineRun {
    /// Where on the line the bytes go.
    pub fn offset(&self) -> u64 {
        match self {
            Self::Locked(run) => run.offset,
            Self::Staged { offset, .. } => *offset,
        }
    }

    /// How many there are.
    pub fn size(&self) -> Bytes {
        match self {
            Self::Locked(run) => run.bytes.size(),
            Self::Staged { bytes, .. } => bytes.size(),
        }
    }
}

impl fmt::Debug for LineRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Locked(run) => write!(f, "locked, {run:?}"),
            Self::Staged { offset, bytes } => write!(f, "staged, to {offset}: {bytes:?}"),
        }
    }
}

impl SourceTensor {
    /// Tensor `id`, whose device bytes begin at `offset` of the line.
    pub fn new(id: u32, offset: u64, bytes: impl Into<SourceBytes>) -> Self {
        Self { id, offset, bytes: bytes.into(), lock: true }
    }

    /// Leaves it where its owner has it, and not page-locked.
    #[must_use]
    pub fn unlocked(mut self) -> Self {
        self.lock = false;
        self
    }
}

impl fmt::Debug for SourceTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor {} for {}: {:?}", self.id, self.offset, self.bytes)
    }
}

impl HostRun {
    /// Bytes for `offset` of the line.
    pub fn new(offset: u64, bytes: HostBytes) -> Self {
        Self { offset, bytes }
    }

    /// Where on the line they go.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The bytes.
    pub fn bytes(&self) -> &HostBytes {
        &self.bytes
    }
}

impl fmt::Debug for HostRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "to {}: {:?}", self.offset, self.bytes)
    }
}
