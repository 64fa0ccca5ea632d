//! What kind of memory an address range is, read from the process's memory maps. Registering the wrong kind does not
//! return (a private file mapping) or locks pages that the allocator goes on using (the heap).
#![forbid(unsafe_code)]

use std::ops::Range;

use crate::error::Result;
use crate::system;

/// What stands behind a range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Private anonymous memory, readable and writable: what large allocations are.
    Anonymous,
    /// The heap proper, which grows and shrinks at its end.
    Heap,
    /// A private mapping of a file: what `safetensors` and `torch.load(mmap=True)` give.
    PrivateFile,
    /// A shared mapping of a file or of shared memory.
    SharedFile,
    /// Anything else: stacks, device memory, memory without read and write permission.
    Special,
    /// Several kinds.
    Mixed,
    /// Some of it is not mapped at all.
    Unmapped,
}

/// A moment's view of the process's memory maps.
#[derive(Debug, Clone, Default)]
pub struct HostMaps {
    /// Sorted and disjoint.
    areas: Vec<(Range<u64>, MemoryKind)>,
}

impl HostMaps {
    /// Reads the maps of this process.
    pub fn read() -> Result<Self> {
        Ok(Self::parse(&system::read_maps()?))
    }

    /// Understands maps in the format of `/proc/self/maps`; lines it does not understand count as unmapped.
    pub fn parse(text: &str) -> Self {
        let mut areas: Vec<(Range<u64>, MemoryKind)> = text.lines().filter_map(parse_line).collect();
        areas.sort_by_key(|(range, _)| range.start);
        Self { areas }
    }

    /// What `range` is, all of it. An empty range is [`MemoryKind::Unmapped`].
    pub fn kind(&self, range: Range<u64>) -> MemoryKind {
        let mut at = range.start;
        let mut kind = None;
        let first = self.areas.partition_point(|(area, _)| area.end <= at);
        for (area, here) in &self.areas[first..] {
            if area.start > at || at >= range.end {
                break;
            }
            match kind {
                None => kind = Some(*here),
                Some(before) if before != *here => kind = Some(MemoryKind::Mixed),
                Some(_) => {}
            }
            at = area.end;
        }
        match kind {
            Some(kind) if at >= range.end => kind,
            _ => MemoryKind::Unmapped,
        }
    }
}

/// `start-end permissions offset device inode path`, the path possibly missing and possibly with spaces.
fn parse_line(line: &str) -> Option<(Range<u64>, MemoryKind)> {
    let mut fields = line.split_ascii_whitespace();
    let (start, end) = fields.next()?.split_once('-')?;
    let range = u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?;
    let permissions = fields.next()?;
    let inode = fields.nth(2)?;
    let path = fields.next().unwrap_or("");
    let kind = if permissions.ends_with('s') {
        MemoryKind::SharedFile
    } else if inode != "0" {
        MemoryKind::PrivateFile
    } else if path == "[heap]" {
        MemoryKind::Heap
    } else if permissions.starts_with("rw") && (path.is_empty() || path.starts_with("[anon")) {
        MemoryKind::Anonymous
    } else {
        MemoryKind::Special
    };
    (range.start < range.end).then_some((range, kind))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TEXT: &str = "\
1000-3000 r--p 00000000 08:01 77 /usr/lib/a library.so
3000-5000 rw-p 00000000 00:00 0
5000-6000 rw-p 00000000 00:00 0 [anon:name]
6000-7000 ---p 00000000 00:00 0
8000-9000 rw-p 00000000 00:00 0 [heap]
9000-a000 rw-s 00000000 00:01 5 /memfd:weights (deleted)
a000-b000 rw-s 00000000 00:05 9 /dev/zero (deleted)
b000-c000 rw-p 00000000 00:00 0 [stack]
not a line
";

    #[test]
    fn kinds_follow_permissions_inode_and_name() {
        let maps = HostMaps::parse(TEXT);
        let cases = [
            (0x1000..0x3000, MemoryKind::PrivateFile),
            (0x1800..0x1801, MemoryKind::PrivateFile),
            (0x3000..0x5000, MemoryKind::Anonymous),
            (0x3000..0x6000, MemoryKind::Anonymous),
            (0x4fff..0x6001, MemoryKind::Mixed),
            (0x6000..0x7000, MemoryKind::Special),
            (0x6000..0x7001, MemoryKind::Unmapped),
            (0x7000..0x8000, MemoryKind::Unmapped),
            (0x7fff..0x8001, MemoryKind::Unmapped),
            (0x8000..0x9000, MemoryKind::Heap),
            (0x9000..0xb000, MemoryKind::SharedFile),
            (0xb000..0xc000, MemoryKind::Special),
            (0x2000..0x4000, MemoryKind::Mixed),
            (0xbfff..0xd000, MemoryKind::Unmapped),
            (0xd000..0xe000, MemoryKind::Unmapped),
            (0x0..0x1000, MemoryKind::Unmapped),
            (0x3000..0x3000, MemoryKind::Unmapped),
        ];
        for (range, kind) in cases {
            assert_eq!(maps.kind(range.clone()), kind, "{range:x?}");
        }
    }

    #[test]
    fn an_unreadable_text_maps_nothing() {
        assert_eq!(HostMaps::parse("zz-1 rw-p\n-\n\n5-3 rw-p 0 0:0 0\n").kind(0..1), MemoryKind::Unmapped);
    }

    proptest! {
        #[test]
        fn no_text_is_anonymous_memory_that_does_not_say_so(
            text in "([0-9a-fg]{1,3}-[0-9a-f]{1,17} [rwxps-]{0,5} [0-9a-f]{1,4} [0-9:]{1,5} [0-9]{1,3}( \\PC{0,9})?\n?|\\PC{0,20}){0,6}",
            start in 0u64..0x2000, size in 0u64..0x2000,
        ) {
            let kind = HostMaps::parse(&text).kind(start..start + size);
            let says = text.lines().any(|line| line.split_ascii_whitespace().nth(1).is_some_and(|word| word.starts_with("rw")));
            prop_assert!(kind != MemoryKind::Anonymous || says);
        }
    }
}
