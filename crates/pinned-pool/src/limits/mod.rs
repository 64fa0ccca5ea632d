//! How much memory this process may have at most, and how much of that is left: what page-locking must stay below. Locked
//! pages cannot be reclaimed, so that reaching the limit is a kill and not a slowdown.
#![forbid(unsafe_code)]

mod groups;

use std::path::Path;

use gpu_driver::Bytes;

use crate::claims::locked_file_bytes;
use crate::system;
use groups::{Usage, groups};

/// What stays unlocked of a limit: one part in this many, for everything else in it …
const SPARE: u64 = 8;
/// … and a staging ring at its largest, which what is not locked goes through.
const RING: Bytes = Bytes::mib(256);

/// The smallest of the machine's memory and the limits of the process's control group and its ancestors; `None` if the
/// system does not say.
pub fn memory_limit() -> Option<Bytes> {
    let total = total_memory();
    let text = system::read_text(Path::new(system::CONTROL_GROUPS)).unwrap_or_default();
    let groups = groups(&text, Path::new(system::CONTROL_GROUP_ROOT));
    let limits = groups.iter().filter_map(|group| group.limit(&system::read_text));
    total.into_iter().chain(limits).min()
}

/// All memory of the machine, if the system says.
pub fn total_memory() -> Option<Bytes> {
    memory_line(&system::read_text(Path::new(system::MEMORY_INFO))?, "MemTotal:")
}

/// How many bytes can be page-locked now without bringing the machine, or any control group above this process, near its
/// limit; `None` if the system does not say. Pages of files count as free unless this crate locked them: the kernel takes
/// them back, and locking some that are there already takes no more memory. One part in eight of each limit is kept, and
/// 256 MiB.
pub fn memory_room() -> Option<Bytes> {
    let locked = locked_file_bytes();
    let info = system::read_text(Path::new(system::MEMORY_INFO)).unwrap_or_default();
    let machine = machine_room(&info, locked);
    let text = system::read_text(Path::new(system::CONTROL_GROUPS)).unwrap_or_default();
    let groups = groups(&text, Path::new(system::CONTROL_GROUP_ROOT));
    let rooms = groups.iter().filter_map(|group| group.usage(&system::read_text));
    machine.into_iter().chain(rooms.map(|usage| group_room(usage, locked))).min()
}

/// What the machine has left. It counts locked pages of files as available.
fn machine_room(info: &str, locked: Bytes) -> Option<Bytes> {
    let total = memory_line(info, "MemTotal:")?;
    let available = memory_line(info, "MemAvailable:")?;
    Some(available - locked - spare(total))
}

/// What a group has left.
fn group_room(usage: Usage, locked: Bytes) -> Bytes {
    let reclaimable = usage.files - locked;
    usage.limit - spare(usage.limit) - (usage.used - reclaimable)
}

/// What is kept of a limit.
fn spare(limit: Bytes) -> Bytes {
    Bytes(limit.0 / SPARE) + RING
}

/// The line `name 123 kB`.
fn memory_line(text: &str, name: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib.checked_mul(1024)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_kib() {
        let total = |text| memory_line(text, "MemTotal:");
        assert_eq!(total("MemFree: 1 kB\nMemTotal:  2048 kB\n"), Some(Bytes::mib(2)));
        let hostile =
            ["", "MemTotal: many kB", "MemTotal: 5", "MemTotal: 18446744073709551615 kB", "MemTotal: -1 kB"];
        for text in hostile {
            assert_eq!(total(text), None, "{text}");
        }
    }

    #[test]
    fn the_machine_keeps_a_part_and_counts_locked_files_as_gone() {
        let gib = |count: u64| Bytes::mib(count << 10);
        let info = "MemTotal: 16777216 kB\nMemAvailable: 10485760 kB\n";
        assert_eq!(machine_room(info, Bytes::ZERO), Some(gib(8) - RING));
        assert_eq!(machine_room(info, gib(4)), Some(gib(4) - RING));
        assert_eq!(machine_room(info, gib(40)), Some(Bytes::ZERO));
        assert_eq!(machine_room("MemTotal: 1600 kB", Bytes::ZERO), None);
    }

    #[test]
    fn a_group_counts_pages_of_files_as_free_unless_they_are_locked() {
        let mib = Bytes::mib;
        let usage = |used, files| Usage { limit: mib(512), used, files };
        assert_eq!(group_room(usage(mib(500), mib(480)), Bytes::ZERO), mib(512 - 64 - 256 - 20));
        assert_eq!(group_room(usage(mib(500), mib(480)), mib(100)), mib(72));
        assert_eq!(group_room(usage(mib(500), mib(0)), Bytes::ZERO), Bytes::ZERO);
        assert_eq!(group_room(usage(Bytes(u64::MAX), Bytes(u64::MAX)), Bytes::ZERO), mib(192));
        let unlimited = Usage { limit: Bytes(u64::MAX), used: Bytes(5), files: Bytes(5) };
        assert!(group_room(unlimited, Bytes::ZERO) > mib(1 << 30));
    }

    #[test]
    fn this_machine_has_a_limit_and_room_below_it() {
        let limit = memory_limit().unwrap_or_default();
        assert!(limit > Bytes::mib(64));
        assert!(memory_room().is_some_and(|room| room > Bytes::ZERO && room < limit));
        assert!(total_memory().is_some_and(|total| total >= limit));
    }
}
