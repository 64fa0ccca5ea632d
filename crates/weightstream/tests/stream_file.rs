//! The example that streams from its file, as it is and in a memory control group smaller than the file.
#![allow(missing_docs, dead_code, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

#[path = "../examples/stream_file/main.rs"]
mod stream_file;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const LIMIT: u64 = 512 << 20;
/// The test starts itself in the group, with this set.
const INSIDE: &str = "WEIGHTSTREAM_IN_CGROUP";

#[test]
fn a_network_streams_from_its_file_to_the_same_bits() {
    stream_file::run(Some("host"), 24).unwrap();
}

/// A control group of ours, gone when dropped.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        let groups = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let fields = groups.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
        let fields: Vec<_> = fields.filter(|fields| fields.len() == 3).collect();
        let of = |name: &str| {
            let found = fields.iter().find(|fields| fields[1].split(',').any(|one| one == name));
            found.map(|fields| fields[2].trim_start_matches('/').to_owned())
        };
        let name = format!("weightstream-test-{}", std::process::id());
        let (folder, limit) = if let Some(path) = of("memory") {
            (Path::new("/sys/fs/cgroup/memory").join(path).join(name), "memory.limit_in_bytes")
        } else {
            let path = of("").ok_or("this process is in no control group")?;
            (Path::new("/sys/fs/cgroup").join(path).join(name), "memory.max")
        };
        let refused = |error: std::io::Error| format!("{}: {error}", folder.display());
        fs::create_dir(&folder).map_err(refused)?;
        let group = Self(folder.clone());
        fs::write(folder.join(limit), LIMIT.to_string()).map_err(refused)?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.0) {
            println!("{} stays: {error}", self.0.display());
        }
    }
}

#[test]
fn a_network_larger_than_its_memory_streams_within_it() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(reason) => return println!("skipped: no control group can be made: {reason}"),
    };
    let script = r#"echo $$ > "$0/cgroup.procs" && exec "$1" --exact inside --nocapture"#;
    let status = Command::new("sh")
        .args(["-c", script])
        .arg(&group.0)
        .arg(std::env::current_exe().unwrap())
        .env(INSIDE, "1")
        // In memory the file would count as the process's own.
        .env("TMPDIR", env!("CARGO_TARGET_TMPDIR"))
        .status()
        .unwrap();
    assert!(status.success(), "in its control group the process ended with {status}");
}

/// What runs in the group; nothing where it is not asked for.
#[test]
fn inside() {
    if std::env::var_os(INSIDE).is_some() {
        stream_file::run(Some("host"), 160).unwrap();
    }
}
