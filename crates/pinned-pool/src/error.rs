//! What can go wrong with host memory and transfers, with the sizes and addresses of the failed act.

use std::path::PathBuf;

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
    #[error(
        "host page-lock of {asked} more would exceed the limit of {limit}: {registered} is locked or about to be"
    )]
    RegisterLimit {
        /// What was to be registered.
        asked: Bytes,
        /// The most that may be.
        limit: Bytes,
        /// What is.
        registered: Bytes,
    },
    /// The driver refused to page-lock memory.
    #[error("host page-lock of {size} at {address:#x} failed, which is about RAM alone: {cause}")]
    Register {
        /// Where it begins.
        address: u64,
        /// Its size.
        size: Bytes,
        /// The driver's refusal.
        #[source]
        cause: DriverError,
    },
    /// Bytes were asked for that a file does not have.
    #[error("bytes {offset}..{end} are outside {} of {size}", path.display())]
    OutsideFile {
        /// The file.
        path: PathBuf,
        /// The first byte asked for.
        offset: u64,
        /// One past the last.
        end: u64,
        /// How long the file is, or the part of it that may be read.
        size: Bytes,
    },
    /// Bytes were asked for that a tensor does not have.
    #[error("bytes {offset}..{end} are outside a tensor of {size}")]
    OutsideMemory {
        /// The first byte asked for.
        offset: u64,
        /// One past the last.
        end: u64,
        /// How many there are.
        size: Bytes,
    },
    /// A file could not be opened or read.
    #[error("{size} at byte {offset} of {} could not be read: {message}", path.display())]
    FileRead {
        /// The file.
        path: PathBuf,
        /// Where reading began.
        offset: u64,
        /// How much was to be read.
        size: Bytes,
        /// The system's text.
        message: String,
    },
    /// A file is no longer what it was when it was opened, so that its bytes may be of another model.
    #[error("{} was changed while it is in use: {}", path.display(), how_changed(*before, *after, *written))]
    FileChanged {
        /// The file.
        path: PathBuf,
        /// Its length when it was opened.
        before: Bytes,
        /// Its length now.
        after: Bytes,
        /// The time of its last write when it was opened, in seconds and nanoseconds.
        written: (i64, i64),
    },
    /// A file may not be page-locked where the page cache has it.
    #[error("{} cannot be locked in the page cache: {reason}", path.display())]
    NotMappable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// Page-locking, or copying in order to lock, would bring the machine or a control group near its limit.
    #[error(
        "host page-lock of {asked} more does not fit: {room} can be locked in this machine or control group"
    )]
    NoRoom {
        /// What was to be locked.
        asked: Bytes,
        /// What can be.
        room: Bytes,
    },
    /// The share of the RAM that may be locked makes no sense.
    #[error("{text:?} is no share of the RAM to lock; give a fraction from 0 to 1, such as 0.4")]
    ReservedShare {
        /// What was given.
        text: String,
    },
    /// The caller ended the work.
    #[error("placing a model was cancelled")]
    Cancelled,
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
    /// The staging ring is closed, or its device or one of its threads failed.
    #[error("the staging ring has ended; attach the model again")]
    StagingStopped,
    /// A job was taken back before it was submitted.
    #[error("a copy through the staging ring was cancelled before it was submitted")]
    StagingCancelled,
    /// Bytes of a model could not be read on their way to the device.
    #[error("bytes for {offset} of the line could not be read: {cause}")]
    Unread {
        /// Where on the line they go: this tells which tensor they are of.
        offset: u64,
        /// Why.
        #[source]
        cause: Box<HostError>,
    },
    /// A forked child used what has threads in its parent.
    #[error(
        "the staging ring belongs to the process that was forked; make a model of its own in each process"
    )]
    Forked,
    /// The target addresses are not usable.
    #[error(transparent)]
    Space(#[from] VmmError),
    /// The driver failed a transfer or an event.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// What is seen of a change: of one that keeps the size, only the time of the last write.
fn how_changed(before: Bytes, after: Bytes, (seconds, nanoseconds): (i64, i64)) -> String {
    if before == after {
        return format!(
            "it was written to or touched, and still has {after}, which may be other bytes; load the model again, or, if only its time \
             was changed, give it back: touch -d @{seconds}.{nanoseconds:09}"
        );
    }
    format!("it had {before}, it has {after}; load the model again")
}
