//! A copy of bytes that are not all page-locked, worked out once and submitted many times.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::Bytes;
use vmm_alloc::{AddressSpace, VmmError};

use super::cut::{Chunk, cut};
use super::read::{DirectFile, DirectFiles};
use crate::error::Result;
use crate::prepared::PreparedCopy;
use crate::source::LineRun;
use crate::system;

/// What of a copy is page-locked goes to the device in one call; the rest passes through a staging ring in chunks.
#[derive(Debug)]
pub struct StagedCopy {
    space: Arc<AddressSpace>,
    locked: Option<Arc<PreparedCopy>>,
    chunks: Box<[Part]>,
    staged: Bytes,
}

/// A chunk, and for each of its reads the file that is read around the page cache.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) chunk: Chunk,
    pub(super) direct: Box<[Option<Arc<DirectFile>>]>,
}

impl StagedCopy {
    /// Works out the copy of `runs`, which are in the order of the line, into `space`.
    pub(super) fn new(
        space: &Arc<AddressSpace>,
        runs: &[LineRun],
        chunk: Bytes,
        mut files: Option<&mut DirectFiles>,
    ) -> Result<Arc<Self>> {
        let (mut locked, mut staged) = (Vec::new(), Vec::new());
        for run in runs {
            let (offset, end) = (run.offset(), run.offset().saturating_add(run.size().0));
            if end > space.size().0 {
                return Err(VmmError::OutOfBounds { offset, end, size: space.size() }.into());
            }
            match run {
                LineRun::Locked(run) => locked.push(run.clone()),
                LineRun::Staged { offset, bytes } => staged.push((*offset, bytes.clone())),
            }
        }
        let locked = if locked.is_empty() { None } else { Some(PreparedCopy::new(space, &locked)?) };
        let bytes = staged.iter().map(|(_, bytes)| bytes.size()).sum();
        let chunks = cut(&staged, chunk.0, system::page_size())?.into_iter().map(|chunk| {
            let direct =
                chunk.reads.iter().map(|read| files.as_mut().and_then(|files| files.of(&read.bytes)));
            Part { direct: direct.collect(), chunk }
        });
        Ok(Arc::new(Self { space: Arc::clone(space), locked, chunks: chunks.collect(), staged: bytes }))
    }

    /// How many bytes are copied.
    pub fn bytes(&self) -> Bytes {
        self.locked.as_ref().map_or(Bytes::ZERO, |locked| locked.bytes()) + self.staged
    }

    /// How many of them pass through the staging ring.
    pub fn staged_bytes(&self) -> Bytes {
        self.staged
    }

    /// In how many pieces they are copied.
    pub fn pieces(&self) -> usize {
        let staged: usize = self.chunks.iter().map(|part| part.chunk.pieces.len()).sum();
        self.locked.as_ref().map_or(0, |locked| locked.pieces()) + staged
    }

    /// The part that is page-locked.
    pub fn locked(&self) -> Option<&Arc<PreparedCopy>> {
        self.locked.as_ref()
    }

    /// The range the copy goes to.
    pub fn space(&self) -> &Arc<AddressSpace> {
        &self.space
    }

    pub(super) fn chunks(&self) -> &[Part] {
        &self.chunks
    }
}
