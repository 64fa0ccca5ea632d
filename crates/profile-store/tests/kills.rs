//! Processes that are killed: eight write to one folder and die with SIGKILL at every call of the protocol and at random moments,
//! and no write that was acknowledged is lost.
#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod common;

use std::io::{self, BufRead, BufReader, Write as _};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use std::{env, fs};

use common::{identity, observation};
use profile_store::folder::{Content, Disk, Folder};
use profile_store::rules::PROFILE;
use profile_store::{Json, Store};

/// The folder of a child; what it writes, `writer first last`; and the call at which it kills itself.
const FOLDER: &str = "KILLS_FOLDER";
const WORK: &str = "KILLS_WORK";
const FATAL: &str = "KILLS_FATAL";

/// A folder on disk whose process is killed at a chosen call, in the middle of what the call does.
struct Fatal {
    disk: Disk,
    left: AtomicU64,
}

impl Fatal {
    fn call<T>(&self, half: impl FnOnce(), whole: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 0 {
            half();
            Command::new("kill").args(["-9", &std::process::id().to_string()]).status().unwrap();
            loop {
                std::thread::park();
            }
        }
        whole()
    }
}

impl Folder for Fatal {
    type Lock = <Disk as Folder>::Lock;

    fn prepare(&self) -> io::Result<()> {
        self.call(|| {}, || self.disk.prepare())
    }
    fn lock(&self, wait: Duration) -> io::Result<Option<Self::Lock>> {
        self.call(|| drop(fs::write(self.path().join(".lock"), "")), || self.disk.lock(wait))
    }
    fn read(&self, name: &str, limit: u64) -> io::Result<Content> {
        self.call(|| {}, || self.disk.read(name, limit))
    }
    fn write_new(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let half = || fs::write(self.path().join(name), &bytes[..bytes.len() / 2]).unwrap();
        self.call(half, || self.disk.write_new(name, bytes))
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        self.call(|| {}, || self.disk.rename(from, to))
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        self.call(|| {}, || self.disk.remove(name))
    }
    fn names(&self) -> io::Result<Vec<String>> {
        self.call(|| {}, || self.disk.names())
    }
    fn sync(&self) -> io::Result<()> {
        self.call(|| {}, || self.disk.sync())
    }
    fn path(&self) -> &Path {
        self.disk.path()
    }
}

/// Not a test of its own: what a child does. It says each write once it is on the disk.
#[test]
fn child() {
    let (Ok(folder), Ok(work)) = (env::var(FOLDER), env::var(WORK)) else { return };
    let left = env::var(FATAL).map_or(u64::MAX, |call| call.parse().unwrap());
    let disk = Fatal { disk: Disk::new(folder), left: AtomicU64::new(left) };
    let store = Store::new(disk, PROFILE).waiting(Duration::from_mins(5));
    let numbers: Vec<u32> = work.split(' ').map(|number| number.parse().unwrap()).collect();
    let [writer, first, last] = numbers[..] else { panic!("{work}") };
    for number in first..last {
        store.update(&identity(), |record| record.put(&key(writer, number), observation(number))).unwrap();
        // Not through the test harness, which would keep it back.
        writeln!(io::stdout().lock(), "\nwritten {number}").unwrap();
    }
}

fn key(writer: u32, number: u32) -> String {
    format!("{writer}-{number}")
}

fn start(folder: &Path, writer: u32, first: u32, last: u32, fatal: Option<u64>) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture", "--test-threads=1"]);
    command.env(FOLDER, folder).env(WORK, format!("{writer} {first} {last}"));
    if let Some(call) = fatal {
        command.env(FATAL, call.to_string());
    }
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

/// Waits for a child's end. The number after its last acknowledged write.
fn end(mut child: Child, first: u32) -> (u32, std::process::ExitStatus) {
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let said = lines.filter_map(|line| line.strip_prefix("written ")?.parse::<u32>().ok());
    let next = said.last().map_or(first, |number| number + 1);
    (next, child.wait().unwrap())
}

/// Everything that should be there is, the file is JSON, and no unfinished file is left.
fn whole(folder: &Path, keys: impl IntoIterator<Item = String>) {
    let store = Store::at(folder);
    // A last writer, so that what the killed ones left has been swept.
    store.update(&identity(), |_| Ok(())).unwrap();
    let loaded = store.load(&identity());
    assert_eq!(loaded.notices, []);
    let record = loaded.record.unwrap();
    let mut missing: Vec<_> = keys.into_iter().filter(|key| record.get(key).is_none()).collect();
    missing.truncate(5);
    assert_eq!(missing, [""; 0], "acknowledged writes are missing");
    let names = Disk::new(folder).names().unwrap();
    let stray: Vec<_> = names.iter().filter(|n| *n != ".lock" && **n != identity().file_name()).collect();
    assert!(stray.is_empty(), "{stray:?}");
    assert!(Json::parse(&fs::read(folder.join(identity().file_name())).unwrap()).is_ok());
}

#[test]
fn a_writer_that_is_killed_at_any_call_costs_nothing_that_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(folder.path());
    store.update(&identity(), |record| record.put("before", observation(0))).unwrap();
    // One update is seven calls, eight where a dead writer's file is removed: three updates die at each of their calls.
    let mut acknowledged = vec!["before".to_owned()];
    for fatal in 0..24 {
        let child = start(folder.path(), fatal, 0, 4, Some(fatal.into()));
        let (next, status) = end(child, 0);
        assert_eq!(status.signal(), Some(9), "call {fatal}");
        let record = store.load(&identity());
        assert_eq!(record.notices, [], "the file is whole at any moment");
        acknowledged.extend((0..next).map(|number| key(fatal, number)));
    }
    whole(folder.path(), acknowledged);
}

#[test]
fn eight_processes_with_kills_in_between_lose_nothing() {
    const WRITERS: u32 = 8;
    const WRITES: u32 = 50;
    let folder = tempfile::tempdir().unwrap();
    // Each writer in turn is killed after a while that differs, and started again after what it acknowledged.
    let threads: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let folder = folder.path().to_owned();
            std::thread::spawn(move || {
                let (mut next, mut kills) = (0, 0);
                while next < WRITES {
                    let child = start(&folder, writer, next, WRITES, None);
                    if kills < 3 {
                        std::thread::sleep(Duration::from_millis(u64::from(20 + 37 * writer + 53 * kills)));
                        let id = child.id().to_string();
                        let _ = Command::new("kill").args(["-9", &id]).stderr(Stdio::null()).status();
                        kills += 1;
                    }
                    next = end(child, next).0;
                }
            })
        })
        .collect();
    let reader = Store::at(folder.path());
    while threads.iter().any(|thread| !thread.is_finished()) {
        assert_eq!(reader.load(&identity()).notices, [], "readers see whole files only");
        std::thread::sleep(Duration::from_millis(5));
    }
    for thread in threads {
        thread.join().unwrap();
    }
    whole(folder.path(), (0..WRITERS).flat_map(|writer| (0..WRITES).map(move |number| key(writer, number))));
}
