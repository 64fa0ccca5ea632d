//! The safetensors format: eight bytes of length, that many bytes of JSON, then the tensors' bytes with no gap.
//!
//! ```text
//! | N: u64, little endian | N bytes of JSON: {"name": {"dtype", "shape", "data_offsets"}, …} | tensors' bytes |
//! 0                       8                                                                8 + N            end
//! ```
//!
//! `header.rs` reads the JSON, `layout.rs` checks that the tensors cover the data exactly, `problem.rs` says what is wrong.

mod dtype;
mod header;
mod layout;
mod problem;

use std::io::{self, Read};
use std::path::Path;

pub use dtype::dtype_from_name;
pub use problem::HeaderProblem;

use crate::foreign::{self, Foreign};
use crate::json::Scanner;
use crate::{CheckpointError, FileHeader, Limits, Result};

/// Bytes of the length before the header.
const LENGTH: u64 = 8;

/// Reads the header of a safetensors file of `size` bytes from its first byte on. `path` is for messages only.
///
/// Whatever is accepted, the official library accepts too, except for what `allow_trailing` allows: bytes after the last
/// tensor. Memory is bounded by `limits`, whatever the file says. No byte after the header is read.
///
/// # Errors
///
/// [`CheckpointError::Header`] says what is wrong with the file, [`CheckpointError::Foreign`] what it is instead.
pub fn read_header(
    mut reader: impl Read,
    size: u64,
    path: &Path,
    limits: &Limits,
    allow_trailing: bool,
) -> Result<FileHeader> {
    let refuse = |problem| Err(CheckpointError::Header { path: path.into(), problem: Box::new(problem) });
    let mut start = Vec::new();
    reader.by_ref().take(LENGTH).read_to_end(&mut start).map_err(|error| unreadable(path, error))?;
    let length = match <[u8; 8]>::try_from(&start[..]) {
        Ok(bytes) => u64::from_le_bytes(bytes),
        Err(_) if size >= LENGTH => return Err(unreadable(path, io::ErrorKind::UnexpectedEof.into())),
        Err(_) => return refuse_start(&start, path, HeaderProblem::of_size(size)),
    };
    // Not `LENGTH + length`, which a hostile length overflows.
    let Some(data) = size.checked_sub(LENGTH).and_then(|rest| rest.checked_sub(length)) else {
        reader
            .take(foreign::LOOK - LENGTH)
            .read_to_end(&mut start)
            .map_err(|error| unreadable(path, error))?;
        let problem = if length > limits.max_header {
            HeaderProblem::TooLong { length, limit: limits.max_header }
        } else {
            HeaderProblem::Cut { length, there: size.saturating_sub(LENGTH) }
        };
        return refuse_start(&start, path, problem);
    };
    if length > limits.max_header {
        return refuse(HeaderProblem::TooLong { length, limit: limits.max_header });
    }
    if length > limits.free_header && length / limits.max_header_ratio.max(1) > data {
        let ratio = limits.max_header_ratio;
        return refuse(HeaderProblem::OutOfProportion { length, data, ratio });
    }
    let data_start = LENGTH + length;
    let mut parsed = match header::parse(Scanner::new(reader, length), length, limits) {
        Ok(parsed) => parsed,
        Err(HeaderProblem::Unreadable(error)) => return Err(unreadable(path, error)),
        Err(problem) => return refuse(problem),
    };
    match layout::check(&mut parsed.tensors, data_start, data, allow_trailing) {
        Ok(trailing) => {
            Ok(FileHeader { tensors: parsed.tensors, metadata: parsed.metadata, data_start, trailing })
        }
        Err(problem) => refuse(problem),
    }
}

/// Says what the file is if its first bytes tell, and what is wrong with it as a safetensors file otherwise.
fn refuse_start(start: &[u8], path: &Path, problem: HeaderProblem) -> Result<FileHeader> {
    Err(match Foreign::of(start) {
        Some(kind) => CheckpointError::Foreign { path: path.into(), kind },
        None => CheckpointError::Header { path: path.into(), problem: Box::new(problem) },
    })
}

fn unreadable(path: &Path, source: io::Error) -> CheckpointError {
    CheckpointError::Io { act: "read the header of", path: path.into(), source }
}
