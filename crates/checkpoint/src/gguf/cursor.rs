//! Reads a header front to back through one small window. It owns the bounds: no read passes the file's end or the header
//! limit, and no more is held than a window.

use std::ops::Range;

use super::{ByteSource, GgufProblem};
use crate::{CheckpointError, Result};

/// Bytes read at a time. Keys, names and numbers are far smaller; long text and lists are walked through it.
const WINDOW: usize = 64 << 10;

/// A place in a header that only moves on.
pub(super) struct Cursor<'a> {
    source: &'a dyn ByteSource,
    size: u64,
    limit: u64,
    window: Vec<u8>,
    /// Where the window starts, from the file's start.
    start: u64,
    /// How much of the window was used.
    used: usize,
}

/// What is being read, for errors.
#[derive(Debug, Clone, Copy)]
pub(super) enum Place<'a> {
    /// The fixed fields at the start.
    Start,
    /// A key, by its number.
    Key(u64),
    /// The value of a key.
    Value(&'a str),
    /// A tensor's entry, by its number.
    Tensor(u64),
    /// The entry of a tensor whose name is known.
    Named(&'a str),
}

impl Place<'_> {
    /// In words that follow "inside".
    pub(super) fn words(self) -> String {
        match self {
            Self::Start => "the fixed fields at its start".into(),
            Self::Key(index) => format!("key {index} of its metadata"),
            Self::Value(key) => format!("the value of {key:?}"),
            Self::Tensor(index) => format!("entry {index} of its tensor table"),
            Self::Named(name) => format!("the table's entry for tensor {name:?}"),
        }
    }
}

impl<'a> Cursor<'a> {
    /// From the file's byte `start` on, to `limit` at most.
    pub(super) fn new(source: &'a dyn ByteSource, start: u64, limit: u64) -> Self {
        Self { source, size: source.size(), limit, window: Vec::new(), start, used: 0 }
    }

    /// Another cursor, over bytes that this one has passed.
    pub(super) fn again(&self, range: Range<u64>) -> Self {
        Self::new(self.source, range.start, range.end)
    }

    /// Where the next byte is, from the file's start.
    pub(super) fn position(&self) -> u64 {
        self.start + self.used as u64
    }

    /// How many bytes of the file follow.
    pub(super) fn left(&self) -> u64 {
        self.size.saturating_sub(self.position())
    }

    /// An error about this file.
    pub(super) fn fail<T>(&self, problem: GgufProblem) -> Result<T> {
        Err(CheckpointError::gguf(self.source.path(), problem))
    }

    /// The next `N` bytes.
    pub(super) fn take<const N: usize>(&mut self, place: Place<'_>) -> Result<[u8; N]> {
        self.fill(N, place)?;
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.window[self.used..self.used + N]);
        self.used += N;
        Ok(bytes)
    }

    /// The next number of 32 bits.
    pub(super) fn u32(&mut self, place: Place<'_>) -> Result<u32> {
        self.take(place).map(u32::from_le_bytes)
    }

    /// The next number of 64 bits.
    pub(super) fn u64(&mut self, place: Place<'_>) -> Result<u64> {
        self.take(place).map(u64::from_le_bytes)
    }

    /// The next length-prefixed bytes, of which there may be `max`.
    pub(super) fn bytes(&mut self, max: u64, place: Place<'_>) -> Result<Vec<u8>> {
        let length = self.u64(place)?;
        self.reserve(length, place)?;
        if length > max {
            let place = place.words();
            return self.fail(GgufProblem::Limit { place, what: "bytes of text", value: length, limit: max });
        }
        let mut bytes = Vec::with_capacity(length as usize);
        while (bytes.len() as u64) < length {
            let part = (length - bytes.len() as u64).min(WINDOW as u64) as usize;
            self.fill(part, place)?;
            bytes.extend_from_slice(&self.window[self.used..self.used + part]);
            self.used += part;
        }
        Ok(bytes)
    }

    /// The next length-prefixed text, of which there may be `max` bytes, all UTF-8.
    pub(super) fn text(&mut self, max: u64, place: Place<'_>) -> Result<String> {
        let bytes = self.bytes(max, place)?;
        String::from_utf8(bytes).or_else(|_| self.fail(GgufProblem::NotUtf8 { place: place.words() }))
    }

    /// Passes over the next length-prefixed bytes without looking at them.
    pub(super) fn skip_bytes(&mut self, place: Place<'_>) -> Result<()> {
        let length = self.u64(place)?;
        self.skip(length, place)
    }

    /// Passes over so many bytes without reading them.
    pub(super) fn skip(&mut self, bytes: u64, place: Place<'_>) -> Result<()> {
        self.reserve(bytes, place)?;
        let held = (self.window.len() - self.used) as u64;
        if bytes <= held {
            self.used += bytes as usize;
        } else {
            self.start = self.position() + bytes;
            self.window.clear();
            self.used = 0;
        }
        Ok(())
    }

    /// Checks that a list of so many items, each of at least so many bytes, can still follow.
    pub(super) fn check_count(&self, what: impl FnOnce() -> String, count: u64, least: u64) -> Result<()> {
        let room = self.left() / least;
        if count > room {
            let what = what();
            return self.fail(GgufProblem::Count { what, count, left: self.left(), room });
        }
        Ok(())
    }

    /// Checks that so many bytes follow in the file and within the limit.
    fn reserve(&self, bytes: u64, place: Place<'_>) -> Result<()> {
        let offset = self.position();
        if bytes > self.left() {
            let (place, size) = (place.words(), self.size);
            return self.fail(GgufProblem::TruncatedHeader { place, offset, wanted: bytes, size });
        }
        if offset + bytes > self.limit {
            let (value, limit) = (offset + bytes, self.limit);
            return self.fail(GgufProblem::Limit { place: "its header".into(), what: "bytes", value, limit });
        }
        Ok(())
    }

    /// Makes the window hold the next `bytes`, a window at most.
    fn fill(&mut self, bytes: usize, place: Place<'_>) -> Result<()> {
        if self.window.len() - self.used >= bytes {
            return Ok(());
        }
        self.reserve(bytes as u64, place)?;
        self.start = self.position();
        self.used = 0;
        let wanted = WINDOW.min((self.limit.min(self.size) - self.start) as usize);
        self.window.resize(wanted, 0);
        let read = self.source.read_exact_at(self.start, &mut self.window);
        if read.is_err() {
            self.window.clear();
        }
        read
    }
}
