//! What can go wrong with host memory and transfers, with the sizes and addresses of the failed act.

use gpu_driver::{Bytes, DriverError};
use vmm_alloc::VmmError;

/// The result of an operation on host memory or a transfer.
pub type Result<T, E = HostError> = std::result::Result<T, E>;

/// A refusal or failure of host memory or of a transfer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HostError {
    /// The operating system has no memory for a slab.
    #[error("a slab of {size} could not be mapped: {message}; free memory or use a smaller model")]
    Slab {
        /// Its size.
        size: Bytes,
        /// The system's text.
        message: String,
    },
    /// The process's memory maps could not be read.
    #[error("the memory maps of this process could not be read: {message}")]
    Maps {
        /// The system's text.
        message: String,
    },
    /// The threads that fill slabs could not be started.
    #[error("threads to copy into a slab could not be started: {message}")]
    Threads {
        /// The system's text.
        message: String,
    },
    /// Memory that must be whole pages is not.
    #[error("memory at {address:#x} of {size} is not whole pages of {page}")]
    NotWholePages {
        /// Where it begins.
        address: u64,
        /// Its size.
        size: Bytes,
        /// The size of a page.
        page: Bytes,
    },
    /// Pages are registered already, by this or another store.
    #[error("{size} at {address:#x} shares pages with memory that is registered already")]
    AlreadyRegistered {
        /// Where it begins.
        address: u64,
        /// Its size.
        size: Bytes,
    },
    /// More memory would be page-locked than is allowed.
    #[error("page-locking {asked} more would exceed the limit of {limit}: {registered} is registered")]
    RegisterLimit {
        /// What was to be registered.
        asked: Bytes,
        /// The most that may be.
        limit: Bytes,
        /// What is.
        registered: Bytes,
    },
    /// The driver refused to page-lock memory.
    #[error("page-locking {size} at {address:#x} failed: {cause}")]
    Register {
        /// Where it begins.
        address: u64,
        /// Its size.
        size: Bytes,
        /// The driver's refusal.
        #[source]
        cause: DriverError,
    },
    /// A tensor lies outside the line of addresses.
    #[error("tensor {id} at bytes {offset}..{end} is outside the line of {line}")]
    OutsideLine {
        /// Which tensor.
        id: u32,
        /// Its first byte on the line.
        offset: u64,
        /// One past its last.
        end: u64,
        /// The length of the line.
        line: Bytes,
    },
    /// Two tensors share bytes of the line.
    #[error("tensors {first} and {second} overlap on the line of addresses")]
    Overlap {
        /// The one that begins first.
        first: u32,
        /// The other.
        second: u32,
    },
    /// A tensor was placed before.
    #[error("tensor {id} has been placed already")]
    PlacedTwice {
        /// Which tensor.
        id: u32,
    },
    /// A stream or event of one driver met memory or events of another.
    #[error("a {what} of another device's driver was given to this stream")]
    ForeignDevice {
        /// What it was.
        what: &'static str,
    },
    /// The target addresses are not usable.
    #[error(transparent)]
    Space(#[from] VmmError),
    /// The driver failed a transfer or an event.
    #[error(transparent)]
    Driver(#[from] DriverError),
}
