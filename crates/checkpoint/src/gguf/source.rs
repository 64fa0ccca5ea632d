//! Where header bytes come from: an open file, or memory in tests and for headers fetched some other way.

use std::io;
use std::path::Path;

use crate::{CheckpointError, OpenFile, Result};

/// Bytes that can be read at any place, and how many there are.
pub trait ByteSource {
    /// What errors name.
    fn path(&self) -> &Path;

    /// How many bytes there are.
    fn size(&self) -> u64;

    /// Fills `into` from `offset` on. Fails if there are not as many bytes.
    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> Result<()>;
}

impl ByteSource for OpenFile {
    fn path(&self) -> &Path {
        self.path()
    }

    fn size(&self) -> u64 {
        self.size()
    }

    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.read_exact_at_for("the header", offset, into)
    }
}

/// Bytes in memory under a name.
#[derive(Debug, Clone, Copy)]
pub struct MemorySource<'a> {
    path: &'a Path,
    bytes: &'a [u8],
}

impl<'a> MemorySource<'a> {
    /// Bytes that errors shall name so.
    pub fn new(path: &'a Path, bytes: &'a [u8]) -> Self {
        Self { path, bytes }
    }
}

impl ByteSource for MemorySource<'_> {
    fn path(&self) -> &Path {
        self.path
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = usize::try_from(offset).ok();
        let found = from.and_then(|from| self.bytes.get(from..from.checked_add(into.len())?));
        let Some(found) = found else {
            let source = io::ErrorKind::UnexpectedEof.into();
            return Err(CheckpointError::Io { act: "read", path: self.path.to_owned(), source });
        };
        into.copy_from_slice(found);
        Ok(())
    }
}
