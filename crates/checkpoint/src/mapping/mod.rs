//! Private mappings of checkpoint files: the memory that applications see as tensors before anything is copied. They may
//! be written to; what is written goes to copies of the pages and never to the file.
//!
//! ```text
//! file      | header | tensor a        | tensor b        | tensor c   |
//! pages     |  file  |  file  |  file  |  own   |  file  |  file      |   own: written to since, so that the file has
//!                                                                          other bytes than the tensor
//! ```
//!
//! Nobody in this workspace reads a file through its mapping: a file that is cut meanwhile would end the process. What is
//! wanted of it is read from the file, and only pages that were written to from memory; [`FileSpan::read`] does both.

mod file_map;
mod pages;
mod registry;
mod span;
pub(crate) mod system;

pub use file_map::FileMap;
pub use registry::file_span;
pub use span::FileSpan;
