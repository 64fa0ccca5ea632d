//! Files and how their bytes get into memory.

mod cancel;
mod file;
mod residency;

pub use cancel::Cancel;
pub use file::OpenFile;
