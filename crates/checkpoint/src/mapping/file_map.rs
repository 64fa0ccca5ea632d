//! One private mapping of a whole file, known to the process for as long as it lives.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use memmap2::MmapMut;

use super::{registry, system};
use crate::error::{CheckpointError, Result};
use crate::io::OpenFile;

/// A file mapped privately, readable and writable: `MAP_PRIVATE | MAP_NORESERVE`. It costs no memory before it is touched,
/// and what is written stays in this process.
///
/// It gives out addresses and no slices: whoever holds one may write through it at any time, and whoever reads through it
/// relies on the file not being cut meanwhile.
#[derive(Debug)]
pub struct FileMap {
    // Before the mapping: dropped in order, so that the file outlives nothing that needs it.
    file: Arc<OpenFile>,
    base: usize,
    memory: MmapMut,
}

impl FileMap {
    /// Maps a whole file. A file that was changed since it was opened is refused.
    ///
    /// The mapping is registered: [`file_span`](super::file_span) finds it by its addresses until the last clone of the
    /// `Arc` is dropped.
    pub fn private(file: &Arc<OpenFile>) -> Result<Arc<Self>> {
        let failed = |source| CheckpointError::Io { act: "map", path: file.path().to_owned(), source };
        file.check_unchanged()?;
        let size =
            usize::try_from(file.size()).map_err(|_| failed(std::io::ErrorKind::FileTooLarge.into()))?;
        let memory = system::map_private(file.file(), size).map_err(failed)?;
        let map = Arc::new(Self { file: Arc::clone(file), base: memory.as_ptr().addr(), memory });
        registry::add(&map);
        Ok(map)
    }

    /// The file.
    pub fn file(&self) -> &Arc<OpenFile> {
        &self.file
    }

    /// The size of the file and of the mapping, in bytes.
    pub fn size(&self) -> u64 {
        self.file.size()
    }

    /// The addresses of the mapping: none for an empty file.
    pub fn addresses(&self) -> Range<usize> {
        // A file of no bytes is mapped as one page by the library below, which nobody may touch.
        self.base..self.base + self.size() as usize
    }

    /// Where these bytes of the file lie in memory; `None` outside the file. Valid while this mapping lives.
    ///
    /// Reading or writing there ends the process if the file was cut meanwhile.
    pub fn pointer(&self, range: Range<u64>) -> Option<NonNull<u8>> {
        if range.start > range.end || range.end > self.size() {
            return None;
        }
        let first = self.memory.as_ptr().cast_mut();
        NonNull::new(first.wrapping_add(range.start as usize))
    }
}

impl Drop for FileMap {
    fn drop(&mut self) {
        registry::remove(self.base);
    }
}
