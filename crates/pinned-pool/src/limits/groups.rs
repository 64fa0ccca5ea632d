//! Control groups: which directories limit this process's memory, and how much is left in each.
#![forbid(unsafe_code)]

use std::path::{Component, Path, PathBuf};

use gpu_driver::Bytes;

/// The two interfaces of the kernel, which name their files differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    One,
    Two,
}

/// A directory that limits the memory of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) directory: PathBuf,
    pub(super) version: Version,
}

/// One group in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) limit: Bytes,
    pub(super) used: Bytes,
    /// Pages of files, which the kernel takes back when it needs them, unless somebody locked them.
    pub(super) files: Bytes,
}

/// The groups named in the lines `id:controllers:path` of `/proc/self/cgroup`, and all groups above them. Inside a
/// container the path may name what is outside: then only the root's files exist.
pub(super) fn groups(text: &str, root: &Path) -> Vec<Group> {
    let mut groups = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (base, version) = match controllers {
            "" => (root.to_path_buf(), Version::Two),
            _ if controllers.split(',').any(|one| one == "memory") => (root.join("memory"), Version::One),
            _ => continue,
        };
        // A process outside its namespace's root is told `/../name`, which is no path below the root.
        let inside = |part: Component<'_>| match part {
            Component::Normal(name) => Some(PathBuf::from(name)),
            _ => None,
        };
        let path: PathBuf = Path::new(path).components().filter_map(inside).collect();
        groups.extend(path.ancestors().map(|above| Group { directory: base.join(above), version }));
    }
    groups
}

impl Group {
    /// The most this group may use, if it is limited. `read` gives a file's text.
    pub(super) fn limit(&self, read: &dyn Fn(&Path) -> Option<String>) -> Option<Bytes> {
        let files: &[&str] = match self.version {
            Version::One => &["memory.limit_in_bytes"],
            // Beyond `high`, the process is slowed down until pages are taken back, which locked ones cannot be.
            Version::Two => &["memory.max", "memory.high"],
        };
        files.iter().filter_map(|name| number(&read(&self.directory.join(name))?)).min()
    }

    /// What is used of the limit, if there is one.
    pub(super) fn usage(&self, read: &dyn Fn(&Path) -> Option<String>) -> Option<Usage> {
        let limit = self.limit(read)?;
        let (used, keys) = match self.version {
            Version::One => ("memory.usage_in_bytes", ["total_inactive_file", "total_active_file"]),
            Version::Two => ("memory.current", ["inactive_file", "active_file"]),
        };
        let used = number(&read(&self.directory.join(used))?)?;
        let stat = read(&self.directory.join("memory.stat")).unwrap_or_default();
        let files = keys.iter().filter_map(|key| line(&stat, key)).sum();
        Some(Usage { limit, used, files })
    }
}

/// A file that holds one number. Version 1 writes no limit as the largest multiple of a page, which is no limit here
/// either since every machine has less.
fn number(text: &str) -> Option<Bytes> {
    text.trim().parse().ok().map(Bytes)
}

/// The number in the line `key number`.
fn line(text: &str, key: &str) -> Option<Bytes> {
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    lines.find(|(name, _)| *name == key).and_then(|(_, value)| number(value))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn directories(text: &str) -> Vec<String> {
        groups(text, Path::new("/r")).iter().map(|group| group.directory.display().to_string()).collect()
    }

    #[test]
    fn a_group_is_limited_by_all_above_it() {
        assert_eq!(directories("0::/a/b\n"), ["/r/a/b", "/r/a", "/r/"]);
        assert_eq!(directories("0::/"), ["/r/"]);
        let old = "5:cpu:/x\n4:memory,hugetlb:/y\nnonsense\n";
        assert_eq!(directories(old), ["/r/memory/y", "/r/memory/"]);
    }

    #[test]
    fn no_text_leads_outside_the_root() {
        for text in
            ["0::/../../etc\n", "0::../../etc", "4:memory:/../a/../../b\n", "0::", "::", ":", "0::/\0/x"]
        {
            for group in groups(text, Path::new("/r")) {
                assert!(group.directory.starts_with("/r"), "{text:?}: {group:?}");
                let up = |part| part == Component::ParentDir;
                assert!(!group.directory.components().any(up), "{text:?}: {group:?}");
            }
        }
        assert!(directories(&"x".repeat(100_000)).is_empty());
        assert_eq!(directories(&format!("0::{}", "/a".repeat(1000))).len(), 1001);
    }

    fn usage(version: Version, files: &[(&str, &str)]) -> Option<Usage> {
        let files: BTreeMap<PathBuf, String> =
            files.iter().map(|(name, text)| (Path::new("/g").join(name), (*text).to_owned())).collect();
        Group { directory: "/g".into(), version }.usage(&|path| files.get(path).cloned())
    }

    #[test]
    fn both_versions_tell_limit_use_and_pages_of_files() {
        let two = [
            ("memory.max", "1000\n"),
            ("memory.high", "max\n"),
            ("memory.current", "700\n"),
            (
                "memory.stat",
                "anon 1\nfile 500\ninactive_file 300\nactive_file 100\nworkingset_refault_file 9\n",
            ),
        ];
        let expected = Usage { limit: Bytes(1000), used: Bytes(700), files: Bytes(400) };
        assert_eq!(usage(Version::Two, &two), Some(expected));
        let one = [
            ("memory.limit_in_bytes", "1000\n"),
            ("memory.usage_in_bytes", "700\n"),
            // The group's own lines do not count what is below it.
            ("memory.stat", "inactive_file 7\ntotal_inactive_file 300\ntotal_active_file 100\n"),
        ];
        assert_eq!(usage(Version::One, &one), Some(expected));
        assert_eq!(usage(Version::Two, &[("memory.max", "max"), ("memory.current", "7")]), None);
        let high = [("memory.max", "1000"), ("memory.high", "800"), ("memory.current", "1")];
        assert_eq!(usage(Version::Two, &high).map(|usage| usage.limit), Some(Bytes(800)));
    }

    #[test]
    fn hostile_texts_are_no_limit_and_no_use() {
        for text in ["", "-1", "1e9", "99999999999999999999999", "0x10", "1 2", "\u{feff}1", "max max"] {
            assert_eq!(
                usage(Version::Two, &[("memory.max", text), ("memory.current", "1")]),
                None,
                "{text:?}"
            );
            assert_eq!(
                usage(Version::Two, &[("memory.max", "5"), ("memory.current", text)]),
                None,
                "{text:?}"
            );
            let files = [("memory.max", "5"), ("memory.current", "1"), ("memory.stat", text)];
            assert_eq!(usage(Version::Two, &files).map(|usage| usage.files), Some(Bytes::ZERO), "{text:?}");
        }
        let stat = format!("inactive_file {}\nactive_file {}\n", u64::MAX, u64::MAX);
        let files = [("memory.max", "5"), ("memory.current", "1"), ("memory.stat", stat.as_str())];
        assert_eq!(usage(Version::Two, &files).map(|usage| usage.files), Some(Bytes(u64::MAX)));
    }

    proptest! {
        #[test]
        fn no_text_is_believed_or_feared(text in "([0-9]{0,3}:[a-z,]{0,8}:[/.a-z0-9\\PC]{0,20}\n?|\\PC{0,20}){0,6}", stat in "\\PC{0,60}") {
            for group in groups(&text, Path::new("/r")) {
                prop_assert!(group.directory.starts_with("/r"));
                prop_assert!(!group.directory.components().any(|part| part == Component::ParentDir));
                let limit = group.limit(&|_| Some(stat.clone()));
                prop_assert_eq!(limit, stat.trim().parse().ok().map(Bytes));
                group.usage(&|_| Some(stat.clone()));
            }
        }
    }
}
