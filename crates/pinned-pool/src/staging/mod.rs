//! The staging ring: page-locked chunks that bytes pass through which are not page-locked themselves, because they are in
//! files, or because locking them was refused or not wanted.
//!
//! ```text
//!   file or RAM ── read by several threads ──▶ slot ── copied by the device ──▶ its addresses
//!                                              free again once the mark behind the copy is reached
//! ```
//!
//! One ring a device in a process, at most 128 MiB by default, shared by all who need it. `queue.rs` decides who does what
//! next and knows no thread; `threads.rs` does it; `device.rs` is what is done. `cut.rs` works out chunks, `read.rs` fills
//! them.
//!
//! **Invariants.** No slot is reused before the device has done with it. A stream's work keeps its order. The memory is
//! bounded, whatever is copied. Nothing is read through a mapping of a file.

mod copy;
mod cut;
mod device;
mod memory;
mod options;
mod queue;
mod read;
mod ring;
mod sync;
mod threads;

pub use copy::StagedCopy;
pub use device::{StagedJob, StagedStep};
pub use options::StagingOptions;
pub use ring::{StagingLine, StagingReport, Ticket};

#[cfg(test)]
mod model;
