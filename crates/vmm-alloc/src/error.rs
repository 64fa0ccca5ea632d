//! What can go wrong with addresses and pages, with what was asked and what there is.

use gpu_driver::{Bytes, DriverError};

/// The result of an operation on addresses or pages.
pub type Result<T, E = VmmError> = std::result::Result<T, E>;

/// A refusal or failure of an [`AddressSpace`](crate::AddressSpace) or a [`PagePool`](crate::PagePool).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum VmmError {
    /// The granule does not fit the device.
    #[error("a granule of {granule} is no multiple of the device's granularity of {granularity}")]
    Granule {
        /// What was asked for.
        granule: Bytes,
        /// The smallest piece the device has.
        granularity: Bytes,
    },
    /// The range is empty or beyond 64 bits.
    #[error("a range of {granules} granules of {granule} cannot be reserved")]
    Size {
        /// How many granules, without the tail.
        granules: u32,
        /// The size of one.
        granule: Bytes,
    },
    /// The pool would exceed its limit; the driver was not asked.
    #[error(
        "the page limit of {limit} does not allow {asked} more: {in_use} is in use; free pages or raise the limit"
    )]
    Limit {
        /// What was asked for.
        asked: Bytes,
        /// What the pool may hold.
        limit: Bytes,
        /// What it holds.
        in_use: Bytes,
    },
    /// Granules outside the range.
    #[error("granules {first}..{end} are outside the range of {granules} granules")]
    OutOfRange {
        /// The first granule asked for.
        first: u64,
        /// One past the last.
        end: u64,
        /// How many there are.
        granules: u32,
    },
    /// Bytes outside the range.
    #[error("bytes {offset}..{end} are outside the range of {size}")]
    OutOfBounds {
        /// The first byte asked for.
        offset: u64,
        /// One past the last.
        end: u64,
        /// The size of the range.
        size: Bytes,
    },
    /// Something is mapped where nothing may be.
    #[error("granule {granule} is mapped already; unmap it first or remap it")]
    Mapped {
        /// The first such granule.
        granule: u32,
    },
    /// Nothing is mapped where something must be.
    #[error("granule {granule} has no page; map it first")]
    Unmapped {
        /// The first such granule.
        granule: u32,
    },
    /// A mapped granule is shut by the guard mode.
    #[error("granule {granule} is inaccessible; set its access to read and write first")]
    Guarded {
        /// The first such granule.
        granule: u32,
    },
    /// A page of another size or another driver.
    #[error("a page of {page} of another device or size cannot be mapped into granules of {granule}")]
    ForeignPage {
        /// The page's size.
        page: Bytes,
        /// The size of this range's granules.
        granule: Bytes,
    },
    /// The range was retired: it stays reserved for its leases and takes no new mappings.
    #[error("the address range was retired; reserve a new one")]
    Retired,
    /// The driver refused; everything is as it was before the call.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The driver refused, and refused again when what had been done was to be undone.
    #[error(transparent)]
    Undo(Box<UndoFailure>),
}

/// Two refusals in a row, after which some granules are not as they were before the call: these, and perhaps more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{cause}, and undoing failed too: {undo}; granules {first}..{end} are inaccessible")]
pub struct UndoFailure {
    /// The first refusal.
    pub cause: DriverError,
    /// The refusal to undo.
    pub undo: DriverError,
    /// The first granule that is not as before.
    pub first: u32,
    /// One past the last.
    pub end: u32,
}

impl From<UndoFailure> for VmmError {
    fn from(failure: UndoFailure) -> Self {
        Self::Undo(Box::new(failure))
    }
}
