//! Where a file lies: its kind of file system, its device, and what direct reads of it must be aligned to.
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

use rustix::fs::{AtFlags, OFlags, StatxFlags};

/// What is assumed where the kernel does not tell: a page suits every device.
const PAGE: usize = 4096;
/// `statfs` numbers of file systems, see statfs(2).
const KNOWN: &[(u64, &str, Kind)] = &[
    (0x0102_1994, "tmpfs", Kind::Memory),
    (0x8584_58f6, "ramfs", Kind::Memory),
    (0x9584_58f6, "hugetlbfs", Kind::Memory),
    (0x6969, "NFS", Kind::Network),
    (0x517b, "SMB", Kind::Network),
    (0xff53_4d42, "CIFS", Kind::Network),
    (0xfe53_4d42, "SMB", Kind::Network),
    (0x00c3_6400, "Ceph", Kind::Network),
    (0x0102_1997, "9p", Kind::Network),
    (0x5346_414f, "AFS", Kind::Network),
    (0x0bd0_0bd0, "Lustre", Kind::Network),
    (0x4750_4653, "GPFS", Kind::Network),
    (0x1983_0326, "BeeGFS", Kind::Network),
    (0x6573_5546, "FUSE", Kind::Network),
    (0x794c_7630, "overlayfs", Kind::Local),
    (0xef53, "ext4", Kind::Local),
    (0x5846_5342, "XFS", Kind::Local),
    (0x9123_683e, "Btrfs", Kind::Local),
    (0x2fc1_2fc1, "ZFS", Kind::Local),
    (0xf2f5_2010, "F2FS", Kind::Local),
    (0xca45_1a4e, "bcachefs", Kind::Local),
];

/// What reading from a file system is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Its files are in memory.
    Memory,
    /// Behind a network, or a process that answers for it.
    Network,
    /// On a device of this machine, as far as is known.
    Local,
}

/// Where a file lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Place {
    /// The file system's name, or its number.
    pub(crate) name: String,
    /// What it is like.
    pub(crate) kind: Kind,
    /// Whether the device has to move a head, so that reads in order are much faster.
    pub(crate) rotating: bool,
}

impl Place {
    /// Finds out. What the system does not tell counts as local and without a head.
    pub(crate) fn of(file: &File) -> Self {
        let number = rustix::fs::fstatfs(file).map_or(0, |found| found.f_type.cast_unsigned() & 0xffff_ffff);
        let (name, kind) = named(number);
        Self { name, kind, rotating: kind == Kind::Local && rotating(file).unwrap_or(false) }
    }
}

fn named(number: u64) -> (String, Kind) {
    let known = KNOWN.iter().find(|(known, _, _)| *known == number);
    known.map_or_else(
        || (format!("file system {number:#x}"), Kind::Local),
        |(_, name, kind)| ((*name).into(), *kind),
    )
}

/// Virtual disks say that they rotate and do not, so that only real devices are believed.
fn rotating(file: &File) -> Option<bool> {
    let device = file.metadata().ok()?.dev();
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let device = fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()?;
    if device.components().any(|part| part.as_os_str().to_string_lossy().contains("virtio")) {
        return None;
    }
    // A partition has its queue one folder up.
    let flags: [PathBuf; 2] = [device.join("queue/rotational"), device.join("../queue/rotational")];
    let flag = flags.iter().find_map(|path| fs::read_to_string(path).ok())?;
    Some(flag.trim() == "1")
}

/// A file opened a second time to be read without the page cache.
#[derive(Debug)]
pub(crate) struct DirectFile {
    /// The file.
    pub(crate) file: File,
    /// Offsets and lengths must be multiples of this.
    pub(crate) offset_align: usize,
    /// Addresses must be multiples of this.
    pub(crate) memory_align: usize,
}

impl DirectFile {
    /// Opens the same file again, even if its name is another's by now. An error where direct reads are not offered.
    pub(crate) fn of(file: &File) -> io::Result<Self> {
        let asked = StatxFlags::DIOALIGN;
        let found = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, asked)?;
        let told = found.stx_mask & asked.bits() != 0;
        let (offset, memory) = if told {
            (found.stx_dio_offset_align as usize, found.stx_dio_mem_align as usize)
        } else {
            (PAGE, PAGE)
        };
        if offset == 0 || memory == 0 {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let usable = |align: usize| align.is_power_of_two() && align <= super::buffer::ALIGN;
        if !usable(offset) || !usable(memory) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let file = reopen(file, OFlags::DIRECT)?;
        Ok(Self { file, offset_align: offset, memory_align: memory })
    }
}

/// Opens an open file again for reading, with a file position, read-ahead and flags of its own.
pub(crate) fn reopen(file: &File, flags: OFlags) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failing test may say so by panicking")]

    use super::*;

    #[test]
    fn file_systems_have_names() {
        assert_eq!(named(0x6969), ("NFS".to_owned(), Kind::Network));
        assert_eq!(named(0xef53).1, Kind::Local);
        assert_eq!(named(0x1234), ("file system 0x1234".to_owned(), Kind::Local));
    }

    #[test]
    fn a_memory_file_lies_in_memory() {
        let file = rustix::fs::memfd_create("place", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let place = Place::of(&File::from(file));
        assert_eq!((place.name.as_str(), place.kind, place.rotating), ("tmpfs", Kind::Memory, false));
    }

    #[test]
    fn the_same_file_is_opened_again_whatever_its_name_is_now() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "old").unwrap();
        let file = File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "new").unwrap();
        assert_eq!(io::read_to_string(reopen(&file, OFlags::empty()).unwrap()).unwrap(), "old");
    }
}
