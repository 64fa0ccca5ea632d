//! How bytes that are not page-locked are cut into chunks: what is read where into a slot, and what is copied on from it.
//!
//! ```text
//!   line    … | tensor a | tensor b      | c | …        c is small
//!   slot      [ a        | b (first part)]  [ b (rest) | c ]
//!               at its place in its page of the file, so that whole pages can be read into whole pages
//! ```
//!
//! Pure. The reads of a chunk are done in order, by one thread.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::Bytes;

use crate::error::Result;
use crate::file::FileBytes;
use crate::source::SourceBytes;

/// From here on, bytes of a file lie in a slot as they lie in the file's pages, which reading around the page cache asks
/// for. Smaller ones are not worth the room of up to two pages.
pub(super) const DIRECT_LEAST: u64 = 128 << 10;

/// Tensors on the line start at multiples of this, so that a smaller gap is padding and may be copied with any content.
const PADDING: u64 = 512;

/// What one slot takes.
#[derive(Debug, Clone, Default)]
pub(super) struct Chunk {
    pub(super) reads: Vec<Read>,
    pub(super) pieces: Vec<Piece>,
}

/// Bytes that are read to `at` of the slot.
#[derive(Debug, Clone)]
pub(super) struct Read {
    pub(super) at: u64,
    pub(super) bytes: SourceBytes,
    /// Where on the line they go, for messages.
    pub(super) offset: u64,
}

/// Bytes that are copied from `at` of the slot to `offset` of the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) at: u64,
    pub(super) offset: u64,
    pub(super) size: u64,
}

impl Chunk {
    /// Where the next read may begin.
    fn end(&self) -> u64 {
        self.pieces.last().map_or(0, |piece| piece.at + piece.size)
    }

    /// Where bytes for `offset` of the line go, if they are to lie as they do in the file's pages.
    fn aligned(&self, file_offset: u64, page: u64) -> u64 {
        self.end().next_multiple_of(page) + file_offset % page
    }

    /// Where other bytes go: behind the last ones as on the line, or on a line of the processor's cache.
    fn packed(&self, offset: u64) -> u64 {
        match self.pieces.last() {
            Some(last) if gap(last, offset).is_some() => self.end() + gap(last, offset).unwrap_or(0),
            _ => self.end().next_multiple_of(64),
        }
    }

    fn push(&mut self, at: u64, offset: u64, bytes: SourceBytes) {
        let size = bytes.size().0;
        match self.pieces.last_mut() {
            Some(last)
                if gap(last, offset) == at.checked_sub(last.at + last.size)
                    && gap(last, offset).is_some() =>
            {
                last.size = at + size - last.at;
            }
            _ => self.pieces.push(Piece { at, offset, size }),
        }
        self.reads.push(Read { at, bytes, offset });
    }
}

/// The padding between a piece and `offset`, if there is only padding.
fn gap(piece: &Piece, offset: u64) -> Option<u64> {
    offset.checked_sub(piece.offset + piece.size).filter(|&gap| gap < PADDING)
}

/// Cuts runs, each with its place on the line, into chunks of at most `capacity` bytes, which is whole pages.
pub(super) fn cut(runs: &[(u64, SourceBytes)], capacity: u64, page: u64) -> Result<Vec<Chunk>> {
    let mut chunks: Vec<Chunk> = Vec::new();
    let mut chunk = Chunk::default();
    for (offset, bytes) in join_files(runs)? {
        let size = bytes.size().0;
        let mut skip = 0;
        while skip < size {
            let rest = size - skip;
            let file = bytes.file().filter(|_| rest >= DIRECT_LEAST).map(|file| file.offset() + skip);
            let at = match file {
                Some(file) => chunk.aligned(file, page),
                None => chunk.packed(offset + skip),
            };
            let room = capacity.saturating_sub(at);
            if room < rest && room < capacity / 8 && !chunk.reads.is_empty() || room == 0 {
                chunks.push(std::mem::take(&mut chunk));
                continue;
            }
            let mut taken = rest.min(room);
            if let Some(file) = file.filter(|_| taken < rest) {
                // The next part begins with a page.
                taken = taken.saturating_sub((file + taken) % page).max(1);
            }
            chunk.push(at, offset + skip, bytes.part(skip, Bytes(taken))?);
            skip += taken;
        }
    }
    if !chunk.reads.is_empty() {
        chunks.push(chunk);
    }
    Ok(chunks)
}

/// Runs that follow one another in a file as on the line are one.
fn join_files(runs: &[(u64, SourceBytes)]) -> Result<Vec<(u64, SourceBytes)>> {
    let mut joined: Vec<(u64, SourceBytes)> = Vec::with_capacity(runs.len());
    for (offset, bytes) in runs.iter().filter(|(_, bytes)| bytes.size() > Bytes::ZERO) {
        if let (Some((start, SourceBytes::File(last))), SourceBytes::File(next)) = (joined.last_mut(), bytes)
        {
            let along_line = offset.checked_sub(*start + last.size().0);
            let along_file = next.offset().checked_sub(last.offset() + last.size().0);
            if along_line.is_some_and(|gap| gap < PADDING)
                && along_line == along_file
                && Arc::ptr_eq(last.file(), next.file())
            {
                let size = next.offset() + next.size().0 - last.offset();
                *last = FileBytes::new(last.file(), last.offset(), Bytes(size))?;
                continue;
            }
        }
        joined.push((*offset, bytes.clone()));
    }
    Ok(joined)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;
    use crate::file::SourceFile;
    use crate::source::HostBytes;

    const PAGE: u64 = 4096;

    fn memory(size: u64) -> SourceBytes {
        HostBytes::of(&Arc::new(vec![7_u8; size as usize])).into()
    }

    fn file(size: u64) -> Arc<SourceFile> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![1; size as usize]).unwrap();
        SourceFile::open(file.path()).unwrap()
    }

    #[test]
    fn neighbours_in_memory_are_one_copy_and_others_are_not() {
        let runs = [(0, memory(1000)), (1024, memory(1000)), (4096, memory(100))];
        let chunks = cut(&runs, 4 * PAGE, PAGE).unwrap();
        let pieces = &chunks[0].pieces;
        assert_eq!(chunks.len(), 1);
        let expected = [Piece { at: 0, offset: 0, size: 2024 }, Piece { at: 2048, offset: 4096, size: 100 }];
        assert_eq!(pieces[..], expected);
    }

    #[test]
    fn tensors_that_follow_one_another_in_a_file_are_read_at_once() {
        let file = file(1 << 20);
        let part = |offset, size| SourceBytes::from(FileBytes::new(&file, offset, Bytes(size)).unwrap());
        let runs = [(0, part(24, 300 << 10)), (300 << 10, part(24 + (300 << 10), 300 << 10))];
        let chunks = cut(&runs, 1 << 20, PAGE).unwrap();
        assert_eq!((chunks.len(), chunks[0].reads.len(), chunks[0].pieces.len()), (1, 1, 1));
        assert_eq!(chunks[0].reads[0].at, 24);
    }

    proptest! {
        #[test]
        fn every_byte_is_read_once_and_copied_to_its_place(
            sizes in proptest::collection::vec((0_u64..700_000, 0_u64..2000, 0_u64..9, any::<bool>()), 1..12),
            pages in 1_u64..80,
        ) {
            let file = file(8 << 20);
            let (mut runs, mut line, mut in_file) = (Vec::new(), 0, 8);
            for (size, gap, shift, from_file) in sizes {
                let bytes = if from_file {
                    let bytes = FileBytes::new(&file, in_file, Bytes(size)).unwrap();
                    in_file += size + shift * 8;
                    in_file %= 1 << 22;
                    bytes.into()
                } else {
                    memory(size)
                };
                runs.push((line, bytes));
                line = (line + size + gap).next_multiple_of(512);
            }
            let capacity = pages * PAGE;
            let chunks = cut(&runs, capacity, PAGE).unwrap();
            // Where each byte of the line comes from: chunk and place in the slot.
            let mut covered = vec![false; line as usize];
            for chunk in &chunks {
                prop_assert!(!chunk.reads.is_empty() && !chunk.pieces.is_empty());
                let mut end = 0;
                for read in &chunk.reads {
                    let size = read.bytes.size().0;
                    prop_assert!(read.at >= end && read.at + size <= capacity, "reads are in order and fit");
                    if let Some(file) = read.bytes.file().filter(|_| read.bytes.size().0 >= DIRECT_LEAST) {
                        prop_assert_eq!(read.at % PAGE, file.offset() % PAGE);
                        prop_assert!(read.at / PAGE * PAGE >= end, "a page of its own at the start");
                    }
                    end = read.at + size;
                    let holds = |piece: &&Piece| piece.at <= read.at && read.at + size <= piece.at + piece.size;
                    let piece = chunk.pieces.iter().find(holds).unwrap();
                    prop_assert_eq!(piece.offset + read.at - piece.at, read.offset);
                    for byte in &mut covered[read.offset as usize..(read.offset + size) as usize] {
                        prop_assert!(!std::mem::replace(byte, true));
                    }
                }
                for pair in chunk.pieces.windows(2) {
                    prop_assert!(pair[0].at + pair[0].size <= pair[1].at);
                }
            }
            for (offset, bytes) in &runs {
                let range = *offset as usize..(offset + bytes.size().0) as usize;
                prop_assert!(covered[range].iter().all(|&byte| byte));
            }
        }
    }
}
