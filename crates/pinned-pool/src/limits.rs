//! How much memory this process may have at most: what page-locking must stay below.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};

use gpu_driver::Bytes;

use crate::system;

/// The smallest of the machine's memory and the limits of the process's control group and its ancestors; `None` if the
/// system does not say. Page-locked memory cannot be reclaimed, so that reaching it is a kill and not a slowdown.
pub fn memory_limit() -> Option<Bytes> {
    let text = |path: &Path| system::read_text(path);
    let total = text(Path::new(system::MEMORY_INFO)).as_deref().and_then(total_memory);
    let groups = text(Path::new(system::CONTROL_GROUPS)).unwrap_or_default();
    let limits = limit_files(&groups, Path::new(system::CONTROL_GROUP_ROOT));
    let limits = limits.iter().filter_map(|path| text(path)).filter_map(|text| text.trim().parse().ok());
    total.into_iter().chain(limits.map(Bytes)).min()
}

/// The line `MemTotal: 123 kB`.
fn total_memory(text: &str) -> Option<Bytes> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(Bytes(kib.checked_mul(1024)?))
}

/// The files that limit the memory of the groups named in the lines `id:controllers:path`, and of all groups above
/// them. Inside a container the path may name what is outside: then only the root's file exists.
fn limit_files(groups: &str, root: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (base, name) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            _ if controllers.split(',').any(|one| one == "memory") => {
                (root.join("memory"), "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let group = Path::new(path.trim_start_matches('/'));
        files.extend(group.ancestors().map(|above| base.join(above).join(name)));
    }
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_total_is_read_in_kib() {
        assert_eq!(total_memory("MemFree: 1 kB\nMemTotal:  2048 kB\n"), Some(Bytes::mib(2)));
        for text in ["", "MemTotal: many kB", "MemTotal: 5", "MemTotal: 18446744073709551615 kB"] {
            assert_eq!(total_memory(text), None, "{text}");
        }
    }

    #[test]
    fn a_group_is_limited_by_all_above_it() {
        let files = |groups: &str| -> Vec<String> {
            limit_files(groups, Path::new("/r")).iter().map(|path| path.display().to_string()).collect()
        };
        assert_eq!(files("0::/a/b\n"), ["/r/a/b/memory.max", "/r/a/memory.max", "/r/memory.max"]);
        assert_eq!(files("0::/"), ["/r/memory.max"]);
        let old = "5:cpu:/x\n4:memory,hugetlb:/y\nnonsense\n";
        assert_eq!(files(old), ["/r/memory/y/memory.limit_in_bytes", "/r/memory/memory.limit_in_bytes"]);
    }

    #[test]
    fn this_machine_has_a_limit() {
        assert!(memory_limit().is_some_and(|limit| limit > Bytes::mib(64)));
    }
}
