//! On which file systems a file may be page-locked where the page cache has it: local ones whose pages are ordinary
//! memory. On a network file system another machine may change the file; DAX maps the storage itself.
#![forbid(unsafe_code)]

use std::fs::File;

use crate::system;

/// File systems that are known to be local, by the number that `statfs` gives, and a name for messages.
const LOCAL: &[(u64, &str)] = &[
    (0xEF53, "ext"),
    (0x5846_5342, "xfs"),
    (0x9123_683E, "btrfs"),
    (0xF2F5_2010, "f2fs"),
    (0x2FC1_2FC1, "zfs"),
    (0xCA45_1A4E, "bcachefs"),
    (0xE0F5_E1E2, "erofs"),
    (0x7371_7368, "squashfs"),
    // A union of others; what lies below is local wherever containers are kept locally.
    (0x794C_7630, "overlayfs"),
    (0x0102_1994, "tmpfs"),
    (0x8584_58F6, "ramfs"),
];

/// File systems that are often met and never locked, for messages.
const OTHER: &[(u64, &str)] = &[
    (0x6969, "nfs"),
    (0x517B, "smb"),
    (0xFF53_4D42, "cifs"),
    (0xFE53_4D42, "smb2"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0x00C3_6400, "ceph"),
    (0x0BD0_0BD0, "lustre"),
    (0x4750_4653, "gpfs"),
    (0x9584_58F6, "hugetlbfs"),
];

/// Why a file's pages must not be locked where they are; `None` if they may be.
pub(crate) fn refusal(file: &File) -> Option<String> {
    match system::file_system(file) {
        Ok((number, dax)) => refuse(number, dax),
        Err(error) => Some(format!("its file system is not known: {error}")),
    }
}

fn refuse(number: u64, dax: bool) -> Option<String> {
    if dax {
        return Some("its file system maps the storage itself (DAX)".into());
    }
    if LOCAL.iter().any(|(local, _)| *local == number) {
        return None;
    }
    let known = OTHER.iter().find(|(other, _)| *other == number);
    let name = known.map_or_else(|| format!("{number:#x}"), |(_, name)| (*name).to_owned());
    Some(format!("its file system ({name}) is not known to be local"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn only_local_file_systems_without_dax_are_taken() {
        assert_eq!(refuse(0xEF53, false), None);
        assert!(refuse(0xEF53, true).unwrap().contains("DAX"));
        assert!(refuse(0x6969, false).unwrap().contains("(nfs)"));
        assert!(refuse(0x1234, false).unwrap().contains("(0x1234)"));
        for (number, name) in OTHER {
            assert!(LOCAL.iter().all(|(local, _)| local != number), "{name}");
        }
    }

    #[test]
    fn a_file_of_this_machine_is_asked() {
        let file = tempfile::tempfile().unwrap();
        let (number, dax) = system::file_system(&file).unwrap();
        assert_eq!(refusal(&file), refuse(number, dax));
    }
}
