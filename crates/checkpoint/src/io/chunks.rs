//! How the bytes that are wanted become reads: in the order of the file, neighbours together, long ones in pieces.
#![forbid(unsafe_code)]
//!
//! ```text
//! file     |      window 0      |      window 1      |      window 2      |
//! wanted     aa b    ccccccccccccccccccccccccccccccccccc    dd
//! chunks     [ab]    [    c     |         c          |  c   d]              a chunk never leaves its window
//! ```

use std::ops::Range;

/// The length of a window, in bytes: the most that one read asks for. Cancelling waits for the reads in flight, and
/// buffers are of this size. 16 in flight keep any device busy that was measured.
pub(crate) const WINDOW: u64 = 4 << 20;
/// The longest hole between two tensors that is read along: a page, which the page cache would read anyway.
const HOLE: u64 = 4096;
/// The most tensors that one read fills; a call takes 1,024 places, holes included.
const PARTS: usize = 500;

/// Bytes that are wanted.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    /// Which file.
    pub(crate) file: usize,
    /// Which job, to name it in errors.
    pub(crate) job: usize,
    /// Where the bytes begin in the file.
    pub(crate) offset: u64,
    /// Where they go.
    pub(crate) target: &'a mut [u8],
}

/// A piece of a job.
#[derive(Debug)]
pub(crate) struct Part<'a> {
    /// Which job.
    pub(crate) job: usize,
    /// Where the bytes begin in the file.
    pub(crate) at: u64,
    /// Where they go.
    pub(crate) target: &'a mut [u8],
}

impl Part<'_> {
    /// The bytes of the file.
    pub(crate) fn range(&self) -> Range<u64> {
        self.at..self.at + self.target.len() as u64
    }
}

/// What one read fetches.
#[derive(Debug)]
pub(crate) struct Chunk<'a> {
    /// Which file.
    pub(crate) file: usize,
    /// From the first byte of the first part to the last of the last.
    pub(crate) range: Range<u64>,
    /// In the order of the file, apart from each other, never empty.
    pub(crate) parts: Vec<Part<'a>>,
}

impl<'a> Chunk<'a> {
    /// How many bytes are wanted, holes left out.
    pub(crate) fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.target.len() as u64).sum()
    }

    /// Whether this piece may be read along.
    fn takes(&self, file: usize, at: u64) -> bool {
        self.file == file
            && self.range.start / WINDOW == at / WINDOW
            && (self.range.end..=self.range.end + HOLE).contains(&at)
            && self.parts.len() < PARTS
    }

    fn push(&mut self, part: Part<'a>) {
        self.range.end = part.range().end;
        self.parts.push(part);
    }
}

/// Cuts what is wanted into chunks, in the order of files and of bytes in them.
pub(crate) fn cut(mut wanted: Vec<Wanted<'_>>) -> Vec<Chunk<'_>> {
    wanted.sort_by_key(|wanted| (wanted.file, wanted.offset, wanted.target.len()));
    let mut chunks: Vec<Chunk<'_>> = Vec::new();
    for Wanted { file, job, offset, mut target } in wanted {
        let mut at = offset;
        while !target.is_empty() {
            let left = WINDOW - at % WINDOW;
            let (piece, rest) = target.split_at_mut((target.len() as u64).min(left) as usize);
            let part = Part { job, at, target: piece };
            at = part.range().end;
            match chunks.last_mut() {
                Some(chunk) if chunk.takes(file, part.at) => chunk.push(part),
                _ => chunks.push(Chunk { file, range: part.range(), parts: vec![part] }),
            }
            target = rest;
        }
    }
    chunks
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failing test may say so by panicking")]

    use super::*;

    fn ranges(jobs: &[(usize, u64, u64)]) -> Vec<(usize, Range<u64>, usize)> {
        let mut targets: Vec<_> = jobs.iter().map(|(_, _, size)| vec![0; *size as usize]).collect();
        let wanted = jobs.iter().zip(&mut targets).enumerate();
        let wanted = wanted.map(|(job, ((file, offset, _), target))| Wanted {
            file: *file,
            job,
            offset: *offset,
            target,
        });
        let chunks = cut(wanted.collect());
        chunks.into_iter().map(|c| (c.file, c.range, c.parts.len())).collect()
    }

    #[test]
    fn neighbours_are_read_together_and_in_order() {
        assert_eq!(ranges(&[(0, 300, 50), (0, 100, 200), (0, 360, 1)]), [(0, 100..361, 3)]);
        assert_eq!(ranges(&[(0, 0, 10), (0, 10 + HOLE, 10)]), [(0, 0..20 + HOLE, 2)]);
        assert_eq!(ranges(&[(0, 0, 10), (0, 11 + HOLE, 10)]).len(), 2, "a hole is not worth reading");
        assert_eq!(ranges(&[(1, 0, 10), (0, 10, 10)]), [(0, 10..20, 1), (1, 0..10, 1)]);
        assert_eq!(
            ranges(&[(0, 0, 10), (0, 5, 10), (0, 0, 10)]).len(),
            3,
            "bytes wanted twice are read twice"
        );
        assert_eq!(ranges(&[(0, 7, 0)]), []);
        let many: Vec<_> = (0..=PARTS as u64).map(|i| (0, i, 1)).collect();
        assert_eq!(ranges(&many).iter().map(|r| r.2).collect::<Vec<_>>(), [PARTS, 1]);
    }

    #[test]
    fn long_ones_are_cut_at_windows() {
        assert_eq!(
            ranges(&[(0, WINDOW - 1, WINDOW + 2), (0, 2 * WINDOW + 1, 5)]),
            [(0, WINDOW - 1..WINDOW, 1), (0, WINDOW..2 * WINDOW, 1), (0, 2 * WINDOW..2 * WINDOW + 6, 2)]
        );
    }
}
