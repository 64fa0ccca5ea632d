//! What reading a header costs is counted, not timed: bytes read, reads made, RAM taken.

use std::cell::Cell;
use std::path::Path;

use checkpoint::gguf::{ByteSource, read_header};
use checkpoint::{Limits, Result};

use crate::build::Bytes;
use crate::counting::taken;

/// A source that counts: some bytes, then others over and over, made when they are read.
struct Counting {
    head: Vec<u8>,
    unit: Vec<u8>,
    size: u64,
    reads: Cell<u64>,
    read: Cell<u64>,
}

impl Counting {
    /// So many bytes in all.
    fn new(head: Bytes, unit: &[u8], size: u64) -> Self {
        Self { head: head.0, unit: unit.to_vec(), size, reads: Cell::new(0), read: Cell::new(0) }
    }

    /// So many units.
    fn of(head: Bytes, unit: &Bytes, count: u64) -> Self {
        let size = head.0.len() as u64 + count * unit.0.len() as u64;
        Self::new(head, &unit.0, size)
    }
}

impl ByteSource for Counting {
    fn path(&self) -> &Path {
        Path::new("m.gguf")
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        assert!(offset + into.len() as u64 <= self.size, "a read past the end");
        self.reads.set(self.reads.get() + 1);
        self.read.set(self.read.get() + into.len() as u64);
        let head = self.head.len() as u64;
        let mut unit = (offset.saturating_sub(head) % self.unit.len() as u64) as usize;
        for (byte, at) in into.iter_mut().zip(offset..) {
            if at < head {
                *byte = self.head[at as usize];
            } else {
                *byte = self.unit[unit];
                unit = if unit + 1 == self.unit.len() { 0 } else { unit + 1 };
            }
        }
        Ok(())
    }
}

#[test]
fn a_list_of_numbers_costs_nothing_however_long() {
    const LONG: u64 = 90_000_000;
    let head = Bytes::file(0, 1).text("zeros").u32(9).u32(0).u64(LONG);
    let source = Counting::of(head, &Bytes(vec![0]), LONG);
    let (header, gguf) = read_header(&source, 0, &Limits::default(), false).unwrap();
    assert!(header.tensors.is_empty());
    assert_eq!(gguf.get("zeros").unwrap().as_array().unwrap().count, LONG);
    assert!(source.read.get() <= 70_000, "{} bytes in {} reads", source.read.get(), source.reads.get());
}

#[test]
fn a_header_is_read_once_in_windows() {
    let tokens = (0..20_000)
        .fold(Bytes::file(1, 1).text("t").u32(9).u32(8).u64(20_000), |file, token: u64| {
            file.text(&token.to_string())
        });
    let file = tokens.tensor("w", &[1 << 40], 0, 0);
    let length = file.0.len();
    let size = length.next_multiple_of(32) as u64 + (4 << 40);
    let source = Counting::new(file, &[0], size);
    let (header, _) = read_header(&source, 0, &Limits::default(), false).unwrap();
    assert_eq!(header.tensors[0].bytes(), 4 << 40);
    let most = length as u64 + (64 << 10) + 256;
    assert!(source.read.get() <= most, "{} bytes of {}", source.read.get(), length);
    assert!(source.reads.get() <= most / (64 << 10) + 2, "{} reads", source.reads.get());
}

/// Bombs: everything that takes RAM or time for each byte, as much of it as a header may have.
#[test]
fn bombs_are_refused_within_their_memory() {
    const PART: u64 = 99_999_900;
    let unit = Bytes::default;
    let many = |unit: Bytes, head: &dyn Fn(u64) -> Bytes| {
        let count = PART / unit.0.len() as u64;
        Counting::of(head(count), &unit, count)
    };
    let bombs = [
        // Tensors without bytes, all of one name.
        many(unit().tensor("", &[0], 0, 0), &|count| Bytes::file(count, 0)),
        // Entries, all of one key.
        many(unit().entry_u32("k", 0), &|count| Bytes::file(0, count)),
        // A tensor of millions of dimensions.
        many(unit().u64(1), &|count| Bytes::file(1, 0).text("w").u32(count as u32)),
        // One text as long as the header.
        many(unit().raw(b"text"), &|count| Bytes::file(0, 1).text("k").u32(8).u64(4 * count)),
        // Lists of empty lists and of empty texts: walked, not kept.
        many(unit().u32(4).u64(0), &|count| Bytes::file(0, 1).text("k").u32(9).u32(9).u64(count)),
        many(unit().u64(0), &|count| Bytes::file(0, 1).text("k").u32(9).u32(8).u64(count)),
    ];
    let mut limits = Limits::default();
    // As if nobody had counted tensors and entries, to see what is kept of so many.
    (limits.max_tensors, limits.max_metadata_entries) = (usize::MAX, usize::MAX);
    for (index, bomb) in bombs.iter().enumerate() {
        let (outcome, taken) = taken(|| read_header(bomb, 0, &limits, true));
        let refused = outcome.err().map(|error| error.to_string());
        assert_eq!(refused.is_some(), index < 4, "{index}: {refused:?}");
        let read = bomb.read.get();
        assert!(read <= bomb.size + (64 << 10) + 256, "{index}: {read} bytes read");
        // Most of it is the table of the first bomb; walking takes a window.
        let most = if index == 0 { 64 << 20 } else { 1 << 20 };
        assert!(taken.peak <= most, "{index}: {taken:?}");
        assert!(index == 0 || taken.allocations < 10_000, "{index}: {taken:?}");
    }
}

#[test]
fn the_largest_headers_that_are_accepted_stay_within_the_memory_too() {
    let tensors = |count: u64| {
        let entry =
            |file: Bytes, number: u64| file.tensor(&format!("blocks.{number:06}.weight"), &[0, 4, 4], 0, 0);
        (0..count).fold(Bytes::file(count, 0), entry)
    };
    let text = |bytes: usize| Bytes::file(0, 1).entry_text("text", &"x".repeat(bytes));
    let limits = Limits::default();
    for (name, file, accepted) in [
        ("tensors", tensors(150_000), true),
        ("more tensors", tensors(200_000), false),
        ("text", text(limits.max_metadata - 4), true),
        ("more text", text(limits.max_metadata - 3), false),
    ] {
        let source = Counting::new(file, &[0], 100_000_000);
        let (outcome, taken) = taken(|| read_header(&source, 0, &limits, true));
        assert_eq!(outcome.is_ok(), accepted, "{name}: {:?}", outcome.err());
        assert!(taken.peak <= 64 << 20, "{name}: {taken:?}");
    }
}
