//! A file that was opened once and is the same file from then on: every later read goes to what was opened, and whoever
//! wants to know whether it was written to since asks [`OpenFile::check_unchanged`].
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;

use super::residency;
use crate::error::{CheckpointError, Result};

/// An open file, with what it was when it was opened.
#[derive(Debug)]
pub struct OpenFile {
    file: Arc<File>,
    path: PathBuf,
    identity: Identity,
}

/// What tells that a file was written to, cut or extended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

impl Identity {
    fn of(file: &File) -> io::Result<(Self, bool)> {
        let metadata = file.metadata()?;
        let identity = Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        };
        Ok((identity, metadata.is_file()))
    }
}

impl OpenFile {
    /// Opens a regular file for reading.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let failed = |act| {
            let path = path.clone();
            move |source| CheckpointError::Io { act, path, source }
        };
        // Without NONBLOCK, opening a named pipe would wait for a writer.
        let flags = OFlags::NONBLOCK.bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(&path).map_err(failed("open"))?;
        let (identity, regular) = Identity::of(&file).map_err(failed("open"))?;
        if !regular {
            return Err(CheckpointError::NotAFile { path });
        }
        let clear = rustix::fs::fcntl_getfl(&file)
            .and_then(|flags| rustix::fs::fcntl_setfl(&file, flags.difference(OFlags::NONBLOCK)));
        clear.map_err(io::Error::from).map_err(failed("open"))?;
        Ok(Self { file: Arc::new(file), path, identity })
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its size in bytes when it was opened.
    pub fn size(&self) -> u64 {
        self.identity.size
    }

    /// The file itself.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// The device and inode it was on: equal for two openings of the same file.
    pub fn device_and_inode(&self) -> (u64, u64) {
        (self.identity.device, self.identity.inode)
    }

    /// An error if the file was written to, cut or extended since it was opened. One call of `fstat`. A file that was
    /// *replaced* is no error: this one is still the old one.
    ///
    /// One that was only touched is an error too, for nothing less than reading all of it tells it from one with other bytes: the error
    /// says how to give it back its time.
    pub fn check_unchanged(&self) -> Result<()> {
        let now = Identity::of(&self.file);
        let (now, _) =
            now.map_err(|source| CheckpointError::Io { act: "inspect", path: self.path.clone(), source })?;
        if now == self.identity {
            return Ok(());
        }
        let (path, written) = (self.path.clone(), self.identity.modified);
        Err(CheckpointError::Changed { path, was: self.identity.size, size: now.size, written })
    }

    /// Fills `target` from the bytes at `offset`, through the page cache. A file that ends before is an error that names
    /// `what`: a tensor, or a part of the header.
    pub fn read_exact_at_for(&self, what: &str, offset: u64, target: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < target.len() {
            let at = offset + done as u64;
            match self.file.read_at(&mut target[done..], at) {
                Ok(0) => return Err(self.truncated(what, offset, target.len() as u64, at)),
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => return Err(self.failed(what, at, source)),
            }
        }
        Ok(())
    }

    /// Fills `target` from the bytes at `offset`, through the page cache.
    pub fn read_exact_at(&self, offset: u64, target: &mut [u8]) -> Result<()> {
        self.read_exact_at_for("the bytes asked for", offset, target)
    }

    /// The part of these bytes that lies in the page cache, 0 to 1; `None` where the system does not tell.
    pub fn resident_fraction(&self, range: Range<u64>) -> Option<f64> {
        residency::fraction(&self.file, range)
    }

    /// The error for a file that ends at `end`, before the `size` bytes at `offset` do.
    pub(crate) fn truncated(&self, what: &str, offset: u64, size: u64, end: u64) -> CheckpointError {
        CheckpointError::Truncated { path: self.path.clone(), what: what.to_owned(), offset, size, end }
    }

    /// The error for a read at `offset` that the system failed.
    pub(crate) fn failed(&self, what: &str, offset: u64, source: io::Error) -> CheckpointError {
        CheckpointError::Read { path: self.path.clone(), what: what.to_owned(), offset, source }
    }
}
