//! What a store needs of a folder, as one trait, and a folder on disk. Tests put others in its place: one that is killed at a
//! chosen call, and one in memory in which every order of calls is tried.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// The name of the file that is locked. It is never removed: removing it would let two processes hold one lock each.
pub const LOCK: &str = ".lock";

/// A file's content.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// There is no such file.
    Missing,
    /// Its bytes.
    Bytes(Vec<u8>),
    /// It is larger than the limit, by how many bytes it says; it was not read.
    TooLarge(u64),
    /// Something else has its name: a folder, a pipe.
    NoFile,
}

/// The operations of a store. Names are of files in one folder.
pub trait Folder {
    /// Keeps others out while it lives.
    type Lock;

    /// Makes the folder, if it is not there.
    fn prepare(&self) -> io::Result<()>;
    /// Takes the folder's lock, waiting at most this long; `None` if another holds it until then.
    fn lock(&self, wait: Duration) -> io::Result<Option<Self::Lock>>;
    /// Reads a file that is at most `limit` bytes long.
    fn read(&self, name: &str, limit: u64) -> io::Result<Content>;
    /// Writes a file that must not be there yet, down to the disk.
    fn write_new(&self, name: &str, bytes: &[u8]) -> io::Result<()>;
    /// Gives a file another name, in place of what has it.
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// The names of all files.
    fn names(&self) -> io::Result<Vec<String>>;
    /// Brings names down to the disk.
    fn sync(&self) -> io::Result<()>;
    /// Where it is, for messages.
    fn path(&self) -> &Path;
}

/// A folder on disk.
#[derive(Debug, Clone)]
pub struct Disk {
    path: PathBuf,
}

impl Disk {
    /// The folder at this path, which need not be there.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }
}

/// The lock of a [`Disk`]. The system gives it back when the process dies.
#[derive(Debug)]
pub struct DiskLock {
    file: File,
}

impl Drop for DiskLock {
    fn drop(&mut self) {
        // Said aloud and not left to closing: a child that was forked meanwhile has the same open file.
        let _ = self.file.unlock();
    }
}

impl Folder for Disk {
    type Lock = DiskLock;

    fn prepare(&self) -> io::Result<()> {
        fs::create_dir_all(&self.path)
    }

    fn lock(&self, wait: Duration) -> io::Result<Option<DiskLock>> {
        let path = self.path.join(LOCK);
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let end = Instant::now() + wait;
        let mut pause = Duration::from_millis(1);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(DiskLock { file })),
                Err(TryLockError::Error(error)) if error.kind() != io::ErrorKind::Interrupted => {
                    return Err(error);
                }
                Err(_) if Instant::now() >= end => return Ok(None),
                Err(_) => thread::sleep(pause.min(end.saturating_duration_since(Instant::now()))),
            }
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    fn read(&self, name: &str, limit: u64) -> io::Result<Content> {
        let path = self.path.join(name);
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Content::Missing),
            Err(error) => return Err(error),
            // Asked before it is opened: opening a pipe would wait for a writer.
            Ok(about) if !about.is_file() => return Ok(Content::NoFile),
            Ok(about) if about.len() > limit => return Ok(Content::TooLarge(about.len())),
            Ok(_) => {}
        }
        let file = match File::open(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Content::Missing),
            other => other?,
        };
        let mut bytes = Vec::new();
        file.take(limit + 1).read_to_end(&mut bytes)?;
        let length = bytes.len() as u64;
        Ok(if length > limit { Content::TooLarge(length) } else { Content::Bytes(bytes) })
    }

    fn write_new(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create_new(true).open(self.path.join(name))?;
        file.write_all(bytes)?;
        file.sync_all()
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        fs::rename(self.path.join(from), self.path.join(to))
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path.join(name))
    }

    fn names(&self) -> io::Result<Vec<String>> {
        // Names that are no text are not ours.
        let names = fs::read_dir(&self.path)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
        names.filter_map(Result::transpose).collect()
    }

    fn sync(&self) -> io::Result<()> {
        // Windows has no such call for folders; there a rename is journalled.
        if cfg!(unix) { File::open(&self.path)?.sync_all() } else { Ok(()) }
    }

    fn path(&self) -> &Path {
        &self.path
    }
}
