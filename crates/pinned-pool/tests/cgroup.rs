//! A model larger than its memory control group: placed and read within it, the process alive. Skipped, with a reason,
//! where this process may not make control groups.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use gpu_driver::{Bytes, Driver, HostDriver, HostOptions};
use pinned_pool::{
    FileBytes, HostError, HostLevel, HostStore, SourceFile, SourceTensor, StoreOptions, memory_limit,
    memory_room, registered_bytes,
};

/// Of the group. What is kept free of it leaves room to lock about 60 MiB.
const LIMIT: u64 = 384 << 20;
const TENSOR: u64 = 32 << 20;
const TENSORS: u64 = 16;
/// The test starts itself in the group, with this set to the file.
const FILE: &str = "PINNED_POOL_CGROUP_FILE";

/// A control group of ours, gone when dropped.
struct Group(PathBuf);

impl Group {
    fn new() -> Result<Self, String> {
        let groups = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
        let own = |controllers: &str| {
            let line = groups.lines().map(|line| line.splitn(3, ':').collect::<Vec<_>>());
            let mut line =
                line.filter(|fields| fields.len() == 3 && fields[1].split(',').any(|one| one == controllers));
            line.next().map(|fields| fields[2].trim_start_matches('/').to_owned())
        };
        let name = format!("pinned-pool-test-{}", std::process::id());
        let (directory, limit) = if let Some(path) = own("memory") {
            (Path::new("/sys/fs/cgroup/memory").join(path).join(name), "memory.limit_in_bytes")
        } else {
            let path = own("").ok_or("this process is in no control group")?;
            (Path::new("/sys/fs/cgroup").join(path).join(name), "memory.max")
        };
        let refused = |error: std::io::Error| format!("{}: {error}", directory.display());
        fs::create_dir(&directory).map_err(refused)?;
        let group = Self(directory.clone());
        fs::write(directory.join(limit), LIMIT.to_string()).map_err(refused)?;
        Ok(group)
    }

    fn is_version_two(&self) -> bool {
        self.0.join("memory.max").exists()
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
fn a_model_larger_than_its_control_group_is_placed_and_read_in_it() {
    let group = match Group::new() {
        Ok(group) => group,
        Err(reason) => return println!("skipped: no control group can be made: {reason}"),
    };
    println!("a control group of version {}", if group.is_version_two() { 2 } else { 1 });
    let named = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // A hole takes as much of the page cache as written bytes do.
    named.as_file().set_len(TENSOR * TENSORS).unwrap();
    for tensor in 0..TENSORS {
        named.as_file().write_all_at(&[tensor as u8 + 1; 8], tensor * TENSOR + 4096).unwrap();
    }
    let script = r#"echo $$ > "$0/cgroup.procs" && exec "$1" --exact inside --nocapture"#;
    let status = Command::new("sh")
        .args(["-c", script])
        .arg(&group.0)
        .arg(std::env::current_exe().unwrap())
        .env(FILE, named.path())
        .status()
        .unwrap();
    assert!(status.success(), "in its control group the process ended with {status}");
}

/// What runs in the group; nothing where it is not asked for.
#[test]
fn inside() {
    let Some(path) = std::env::var_os(FILE) else { return };
    assert_eq!(memory_limit(), Some(Bytes(LIMIT)));
    let room = memory_room().unwrap();
    assert!(room < Bytes(LIMIT / 4), "{room}");
    let driver: Arc<dyn Driver> = Arc::new(HostDriver::new(HostOptions::new(Bytes::mib(64))).unwrap());
    let file = SourceFile::open(PathBuf::from(path)).unwrap();
    let mut builder = HostStore::builder(driver, Bytes(TENSOR * TENSORS), StoreOptions::default());
    for tensor in 0..TENSORS {
        let bytes = FileBytes::new(&file, tensor * TENSOR, Bytes(TENSOR)).unwrap();
        builder.place(&[SourceTensor::new(tensor as u32, tensor * TENSOR, bytes)]).unwrap();
    }
    let store = builder.finish().unwrap();
    let report = store.report();
    println!("{report:?}");
    assert!(registered_bytes() <= room, "{} of {room}", registered_bytes());
    assert!(report.in_files >= Bytes(TENSOR * (TENSORS - 4)), "most of it does not fit");
    assert!(report.step_downs.iter().any(|step| matches!(step.reason, HostError::NoRoom { .. })));
    let mut chunk = vec![0; 8 << 20];
    for tensor in 0..TENSORS {
        assert_ne!(store.placed(tensor as u32).unwrap().level, HostLevel::Pageable);
        for at in (0..TENSOR).step_by(chunk.len()) {
            store.source_of(tensor as u32).unwrap().read_at(at, &mut chunk).unwrap();
            if at == 0 {
                assert_eq!(chunk[4096..4104], [tensor as u8 + 1; 8]);
            }
        }
    }
    store.check_unchanged().unwrap();
}
