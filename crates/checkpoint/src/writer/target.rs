//! A file that is complete or not there: written under another name beside it, made durable, and renamed into place.

use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::{CheckpointError, Result};

/// Files begun by this process.
static BEGUN: AtomicU64 = AtomicU64::new(0);
/// Names tried until one is free. Each holds the process, a counter and 64 random bits: the second is never needed.
const ATTEMPTS: u32 = 16;
/// How often it is asked whether to stop while a disk takes its time.
const LOOK: Duration = Duration::from_millis(20);

/// A file under a name of its own, which disappears unless it is finished.
#[derive(Debug)]
pub(super) struct Target {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    size: u64,
    finished: bool,
}

impl Target {
    /// Begins a file of `size` bytes that shall become `path`, in the same folder. Its room on disk is taken at once where
    /// the file system can do that, so that a full disk is known before anything is written.
    pub(super) fn create(path: &Path, size: u64) -> Result<Self> {
        let failed = |act, source| CheckpointError::Io { act, path: path.to_owned(), source };
        let before = match fs::symlink_metadata(path) {
            Ok(found) if found.is_file() || found.is_symlink() => Some(found),
            Ok(_) => return Err(CheckpointError::NotAFile { path: path.to_owned() }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed("write", error)),
        };
        let folder = folder(path);
        let (file, temporary) = open_new(&folder).map_err(|error| failed("create a file beside", error))?;
        let target = Self { file, temporary, path: path.to_owned(), size, finished: false };
        if let Some(before) = before.filter(fs::Metadata::is_file) {
            target
                .file
                .set_permissions(before.permissions())
                .map_err(|error| failed("set the mode of", error))?;
        }
        target.reserve()?;
        Ok(target)
    }

    /// What it shall become.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes bytes at a place.
    pub(super) fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, offset).map_err(|error| self.failed(error))
    }

    /// Makes the file durable and puts it in its place. `stop` is asked while that takes time, and once more when only the
    /// renaming is left; it ends the work with its error.
    pub(super) fn finish(mut self, stop: impl Fn() -> Result<()>) -> Result<()> {
        let file = self.file.try_clone().map_err(|error| self.failed(error))?;
        match aside(move || file.sync_all(), &stop)? {
            Ok(()) => stop()?,
            Err(error) => return Err(self.failed(error)),
        }
        fs::rename(&self.temporary, &self.path).map_err(|error| self.failed(error))?;
        self.finished = true;
        sync_folder(&folder(&self.path)).map_err(|source| CheckpointError::Io {
            act: "make durable the folder of",
            path: self.path.clone(),
            source,
        })
    }

    /// Takes the room, where the file system can. Asks for it first: taking what is not there would fill the disk for a
    /// moment.
    fn reserve(&self) -> Result<()> {
        if self.free().is_some_and(|free| free < self.size) {
            return Err(self.failed(Errno::NOSPC.into()));
        }
        if self.size == 0 {
            return Ok(());
        }
        loop {
            match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, self.size) {
                Err(Errno::INTR) => {}
                Err(error @ (Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => {
                    return Err(self.failed(error.into()));
                }
                // Done, or not to be done on this file system.
                Ok(()) | Err(_) => break,
            }
        }
        Ok(())
    }

    /// Bytes free for this file, if its file system tells.
    fn free(&self) -> Option<u64> {
        let found = rustix::fs::fstatvfs(&self.file).ok().filter(|found| found.f_blocks > 0)?;
        Some(found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// The error for a write that the system failed.
    fn failed(&self, source: io::Error) -> CheckpointError {
        let path = self.path.clone();
        match Errno::from_io_error(&source) {
            Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
                CheckpointError::NoRoom { path, needed: self.size, free: self.free(), source }
            }
            _ => CheckpointError::Io { act: "write", path, source },
        }
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.finished
            && let Err(error) = fs::remove_file(&self.temporary)
        {
            tracing::warn!(path = %self.temporary.display(), %error, "a file that was not finished could not be removed");
        }
    }
}

/// Does something that takes long and cannot be ended, on a thread of its own, and asks every few milliseconds whether to
/// stop waiting for it. If so, the thread ends when it ends.
fn aside(
    work: impl FnOnce() -> io::Result<()> + Send + 'static,
    stop: impl Fn() -> Result<()>,
) -> Result<io::Result<()>> {
    let (done, outcome) = mpsc::channel();
    let started = thread::Builder::new().name("checkpoint-sync".into()).spawn(move || {
        // Nobody listens any more if the wait was stopped.
        let _ = done.send(work());
    });
    if let Err(error) = started {
        return Ok(Err(error));
    }
    loop {
        match outcome.recv_timeout(LOOK) {
            Ok(outcome) => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => stop()?,
            Err(RecvTimeoutError::Disconnected) => return Ok(Err(io::ErrorKind::Other.into())),
        }
    }
}

/// The folder of a path; the current one for a bare name.
fn folder(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if parent != Path::new("") => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// A new file in a folder, under a name that nobody else uses.
fn open_new(folder: &Path) -> io::Result<(File, PathBuf)> {
    let mut attempt = 0;
    loop {
        let number = BEGUN.fetch_add(1, Ordering::Relaxed);
        let random = RandomState::new().build_hasher().finish();
        let temporary =
            folder.join(format!(".{:x}-{number:x}-{random:016x}.safetensors-part", process::id()));
        attempt += 1;
        match File::options().write(true).create_new(true).open(&temporary) {
            Ok(file) => return Ok((file, temporary)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < ATTEMPTS => {}
            Err(error) => return Err(error),
        }
    }
}

/// Makes a rename durable. Some file systems cannot be asked for that, and need not be.
fn sync_folder(folder: &Path) -> io::Result<()> {
    match File::open(folder)?.sync_all() {
        Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::INVAL | Errno::OPNOTSUPP)) => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failure is the test's")]

    use std::env;
    use std::process::Command;

    use super::*;

    /// The body of the next test, in a process of its own whose files may have 1 MiB at most. Alone, it sees no limit.
    #[test]
    fn a_write_beyond_the_limit_of_a_process() {
        let limits = fs::read_to_string("/proc/self/limits").unwrap();
        let limit = limits.lines().find_map(|line| line.strip_prefix("Max file size")).unwrap();
        let limited = !limit.trim_start().starts_with("unlimited");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, "old").unwrap();
        let target = Target::create(&path, 0).unwrap();
        target.write_at(0, &vec![1; 1 << 10]).unwrap();
        let written = target.write_at(1 << 10, &vec![1; 8 << 20]);
        if limited {
            let error = written.unwrap_err();
            assert!(matches!(error, CheckpointError::NoRoom { .. }), "{error}");
            let error = Target::create(&path, 8 << 20).unwrap_err();
            assert!(matches!(error, CheckpointError::NoRoom { needed: 0x0080_0000, .. }), "{error}");
        } else {
            written.unwrap();
        }
        drop(target);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left");
    }

    #[test]
    fn a_full_disk_in_the_middle_leaves_what_was_there() {
        // The signal that comes with the limit is ignored; the shell can do that without unsafe code.
        let script = r#"trap "" XFSZ; ulimit -f 1024; exec "$0" --exact "$1""#;
        let name = "writer::target::tests::a_write_beyond_the_limit_of_a_process";
        let child =
            Command::new("sh").args(["-c", script]).arg(env::current_exe().unwrap()).arg(name).output();
        let child = child.unwrap();
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn a_slow_disk_can_be_left_waiting() {
        let (release, held) = mpsc::channel::<()>();
        let slow = move || held.recv().map_err(io::Error::other);
        let stopped = aside(slow, || Err(CheckpointError::Cancelled));
        assert!(matches!(stopped, Err(CheckpointError::Cancelled)));
        drop(release);
        assert!(aside(|| Ok(()), || Ok(())).unwrap().is_ok());
        let failed = aside(|| Err(io::ErrorKind::StorageFull.into()), || Ok(())).unwrap();
        assert_eq!(failed.unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn a_bare_name_is_in_the_current_folder() {
        assert_eq!(folder(Path::new("model.safetensors")), Path::new("."));
        assert_eq!(folder(Path::new("/model.safetensors")), Path::new("/"));
        assert_eq!(folder(Path::new("a/b")), Path::new("a"));
    }
}
