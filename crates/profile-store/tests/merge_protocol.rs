//! The merge protocol in every order: two writers and a reader under a scheduler that tries all interleavings of their calls, a
//! writer that dies at every call, and power that fails with any part of what was not flushed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use common::{identity, observation};
use profile_store::folder::{Content, Folder};
use profile_store::rules::PROFILE;
use profile_store::{Record, Store};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use shuttle::sync::{Arc, Condvar};

/// A file's bytes, and whether they are on the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
struct File {
    bytes: Vec<u8>,
    flushed: bool,
}

/// What every process sees, what of it is on the disk, and the lock.
#[derive(Debug, Default)]
struct Shared {
    files: BTreeMap<String, File>,
    /// Names on the disk as of the last flush of the folder.
    durable: BTreeMap<String, File>,
    /// Changes of names since, of which a power failure keeps any number of the first.
    pending: Vec<BTreeMap<String, File>>,
}

/// What processes share. Only one of them runs at a time, and gives way before each call and where it waits for the lock: each
/// further place would multiply the orders, and add none that differs.
#[derive(Debug, Default)]
struct Machine {
    state: Mutex<Shared>,
    locked: shuttle::sync::Mutex<bool>,
    unlocked: Condvar,
}

impl Shared {
    fn renamed(&mut self, change: impl FnOnce(&mut BTreeMap<String, File>)) {
        change(&mut self.files);
        self.pending.push(self.files.clone());
    }
}

/// One process's view of the folder. It dies at call number `fatal`, after half of it.
struct Process {
    machine: Disk,
    calls: AtomicU32,
    fatal: Option<u32>,
}

impl Process {
    fn new(machine: &Disk, fatal: Option<u32>) -> Self {
        Self { machine: machine.clone(), calls: AtomicU32::new(0), fatal }
    }

    /// Lets others go first, then acts; `half` is what a dying process still does.
    fn call<T>(
        &self,
        half: impl FnOnce(&mut Shared),
        whole: impl FnOnce(&mut Shared) -> io::Result<T>,
    ) -> io::Result<T> {
        shuttle::thread::yield_now();
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let mut shared = self.machine.state.lock().unwrap();
        match self.fatal {
            Some(fatal) if call > fatal => Err(io::Error::other("dead")),
            Some(fatal) if call == fatal => {
                half(&mut shared);
                Err(io::Error::other("dead"))
            }
            _ => whole(&mut shared),
        }
    }
}

struct Lock(Disk);

impl Drop for Lock {
    fn drop(&mut self) {
        *self.0.locked.lock().unwrap() = false;
        self.0.unlocked.notify_all();
    }
}

fn missing() -> io::Error {
    io::ErrorKind::NotFound.into()
}

impl Folder for Process {
    type Lock = Lock;

    fn prepare(&self) -> io::Result<()> {
        Ok(())
    }
    fn lock(&self, _: Duration) -> io::Result<Option<Lock>> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if self.fatal.is_some_and(|fatal| call >= fatal) {
            return Err(io::Error::other("dead"));
        }
        let mut locked = self.machine.locked.lock().unwrap();
        while *locked {
            locked = self.machine.unlocked.wait(locked).unwrap();
        }
        *locked = true;
        Ok(Some(Lock(self.machine.clone())))
    }
    fn read(&self, name: &str, _: u64) -> io::Result<Content> {
        let read = |shared: &mut Shared| {
            Ok(shared.files.get(name).map_or(Content::Missing, |file| Content::Bytes(file.bytes.clone())))
        };
        self.call(|_| {}, read)
    }
    fn write_new(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let write = |shared: &mut Shared, bytes: &[u8], flushed| {
            assert!(!shared.files.contains_key(name), "two writers share a name");
            let file = File { bytes: bytes.to_vec(), flushed };
            shared.renamed(|files| drop(files.insert(name.to_owned(), file)));
        };
        self.call(
            |shared| write(shared, &bytes[..bytes.len() / 2], false),
            |shared| {
                write(shared, bytes, true);
                Ok(())
            },
        )
    }
    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let rename = |shared: &mut Shared| {
            let file = shared.files.get(from).cloned().ok_or_else(missing)?;
            shared.renamed(|files| {
                files.remove(from);
                files.insert(to.to_owned(), file);
            });
            Ok(())
        };
        self.call(|_| {}, rename)
    }
    fn remove(&self, name: &str) -> io::Result<()> {
        let remove = |shared: &mut Shared| {
            let mut gone = None;
            shared.renamed(|files| gone = files.remove(name));
            gone.map(drop).ok_or_else(missing)
        };
        self.call(|_| {}, remove)
    }
    fn names(&self) -> io::Result<Vec<String>> {
        self.call(|_| {}, |shared| Ok(shared.files.keys().cloned().collect()))
    }
    fn sync(&self) -> io::Result<()> {
        let sync = |shared: &mut Shared| {
            shared.durable = shared.files.clone();
            shared.pending.clear();
            Ok(())
        };
        self.call(|_| {}, sync)
    }
    fn path(&self) -> &Path {
        Path::new("in memory")
    }
}

type Disk = Arc<Machine>;

fn store(disk: &Disk, fatal: Option<u32>) -> Store<Process> {
    Store::new(Process::new(disk, fatal), PROFILE)
}

fn write(store: &Store<Process>, name: &str) -> bool {
    store.update(&identity(), |record: &mut Record| record.put(name, observation(1))).is_ok()
}

fn names(disk: &Disk) -> Vec<String> {
    let loaded = store(disk, None).load(&identity());
    assert_eq!(loaded.notices, []);
    loaded.record.map(|record| record.names().map(str::to_owned).collect()).unwrap_or_default()
}

/// Two writers, and whoever runs beside them.
fn two_writers(beside: impl FnOnce(&Disk)) {
    let disk = Disk::default();
    let writers = ["a", "b"].map(|name| {
        let disk = disk.clone();
        shuttle::thread::spawn(move || assert!(write(&store(&disk, None), name)))
    });
    beside(&disk);
    for writer in writers {
        writer.join().unwrap();
    }
    assert_eq!(names(&disk), ["a", "b"]);
}

#[test]
fn two_writers_in_every_order() {
    shuttle::check_dfs(|| two_writers(|_| {}), None);
}

#[test]
fn a_reader_beside_two_writers_sees_whole_files() {
    let read = |disk: &Disk| {
        let seen = names(disk);
        assert!(["", "a", "b", "a b"].contains(&&*seen.join(" ")), "{seen:?}");
    };
    shuttle::check_random(move || two_writers(read), 1000);
}

#[test]
fn a_reader_never_sets_a_good_file_aside() {
    shuttle::check_dfs(
        || {
            let disk = Disk::default();
            let bad = File { bytes: b"{".to_vec(), flushed: true };
            disk.state.lock().unwrap().files.insert(identity().file_name(), bad);
            let writer = {
                let disk = disk.clone();
                shuttle::thread::spawn(move || assert!(write(&store(&disk, None), "a")))
            };
            // Bad, and set aside by one of the two; or already written anew.
            let loaded = store(&disk, None).load(&identity());
            assert!(loaded.record.is_none() || loaded.notices.is_empty());
            writer.join().unwrap();
            assert_eq!(names(&disk), ["a"]);
            let files = &disk.state.lock().unwrap().files;
            assert_eq!(
                files.keys().filter(|name| name.contains(".bad") && !name.contains("reason")).count(),
                1
            );
        },
        None,
    );
}

#[test]
fn a_writer_that_dies_at_any_call_in_any_order() {
    // An update is the lock, the names, the read, the write, the rename and the flush.
    for fatal in 0..7 {
        shuttle::check_dfs(
            move || {
                let disk = Disk::default();
                let dying = {
                    let disk = disk.clone();
                    shuttle::thread::spawn(move || write(&store(&disk, Some(fatal)), "a"))
                };
                assert!(write(&store(&disk, None), "b"));
                let done = dying.join().unwrap();
                assert!(write(&store(&disk, None), "c"));
                let names = names(&disk);
                assert!(!done || names.contains(&"a".into()), "an acknowledged write is lost: {names:?}");
                assert!(names.contains(&"b".into()) && names.contains(&"c".into()), "{names:?}");
                let files = &disk.state.lock().unwrap().files;
                assert_eq!(files.len(), 1, "unfinished files are left: {:?}", files.keys());
            },
            None,
        );
    }
}

/// Every state that the disk can have after power failed: any number of the first pending renames, and files that were not
/// flushed empty, half or whole.
fn after_power_failure(shared: &Shared) -> Vec<BTreeMap<String, File>> {
    let mut states = Vec::new();
    for names in std::iter::once(&shared.durable).chain(&shared.pending) {
        for share in [0, 1, 2] {
            let mut files = names.clone();
            for file in files.values_mut().filter(|file| !file.flushed) {
                file.bytes.truncate(file.bytes.len() * share / 2);
                file.flushed = true;
            }
            states.push(files);
        }
    }
    states
}

#[test]
fn power_that_fails_at_any_call_leaves_the_old_record_or_the_new() {
    for fatal in 0..8 {
        shuttle::check_random(
            move || {
                let disk = Disk::default();
                assert!(write(&store(&disk, None), "old"));
                let done = write(&store(&disk, Some(fatal)), "new");
                assert_eq!(done, fatal > 5, "call {fatal}");
                let states = after_power_failure(&disk.state.lock().unwrap());
                for files in states {
                    let disk = Disk::default();
                    disk.state.lock().unwrap().files = files;
                    let names = names(&disk);
                    assert!(
                        names == ["new", "old"] || (!done && names == ["old"]),
                        "call {fatal}: {names:?}"
                    );
                    assert!(write(&store(&disk, None), "next"));
                }
            },
            1,
        );
    }
}
