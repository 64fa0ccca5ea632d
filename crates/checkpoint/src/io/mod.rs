//! Files and how their bytes get into memory: [`OpenFile`], and [`read`] with its four ways behind one call.
//!
//! ```text
//! jobs  → chunks.rs   in the order of the file, neighbours together, at most 4 MiB
//! facts → choose.rs   page cache, file system, device, kernel → the way, and why
//! chunks → worker.rs  threads: pread, O_DIRECT or io_uring; what these leave undone by plain pread
//! ```
//!
//! Nothing here reads a file through a mapping of it.

mod buffer;
mod cancel;
mod choose;
mod chunks;
#[cfg(test)]
mod faults;
mod file;
mod gate;
mod place;
mod read;
mod residency;
mod uring;
mod worker;

pub use cancel::Cancel;
pub use choose::{IoChoice, IoMode};
pub use file::OpenFile;
pub use read::{FileReport, ReadJob, ReadOptions, ReadReport, read};
