//! Bytes of open files: read with `pread`, never through a mapping, so that a file cut short is an error and not a dead
//! process. A file remembers what it was when it was opened, and says whether it still is.
#![forbid(unsafe_code)]

use std::fmt;
use std::fs::{File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use gpu_driver::Bytes;

use crate::error::{HostError, Result};

/// An open file whose bytes are read later, and what it was when this was made.
#[derive(Debug)]
pub struct SourceFile {
    file: Arc<File>,
    path: PathBuf,
    identity: Identity,
}

/// What tells a file, as it was at one moment, from every other. The time of the last status change is no part of it:
/// that moves when a file is renamed or linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    /// The time of the last write, in seconds and nanoseconds.
    written: (i64, i64),
}

impl Identity {
    fn of(found: &Metadata) -> Self {
        let written = (found.mtime(), found.mtime_nsec());
        Self { device: found.dev(), inode: found.ino(), size: found.size(), written }
    }
}

impl SourceFile {
    /// Takes an open file; `path` is for messages.
    ///
    /// # Errors
    /// If the system does not say what the file is.
    pub fn new(file: Arc<File>, path: impl Into<PathBuf>) -> Result<Arc<Self>> {
        let path = path.into();
        let found = file.metadata().map_err(|error| unreadable(&path, 0, Bytes::ZERO, &error))?;
        Ok(Arc::new(Self { file, path, identity: Identity::of(&found) }))
    }

    /// Opens a file for reading.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(path: impl Into<PathBuf>) -> Result<Arc<Self>> {
        let path = path.into();
        let file = File::open(&path).map_err(|error| unreadable(&path, 0, Bytes::ZERO, &error))?;
        Self::new(Arc::new(file), path)
    }

    /// The open file.
    pub fn file(&self) -> &Arc<File> {
        &self.file
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How long it was when this was made.
    pub fn size(&self) -> Bytes {
        Bytes(self.identity.size)
    }

    /// Asks the system whether the file is still what it was: its length and the time of its last write. One call of the
    /// system, cheap enough for every step.
    ///
    /// A file that was only touched is refused with those written to: nothing but reading it whole, before and after, tells them apart,
    /// and a sample of its bytes would pass over the change of one. Who knows better gives it its time back, and it is what it was.
    ///
    /// # Errors
    /// [`HostError::FileChanged`] if it is not.
    pub fn check_unchanged(&self) -> Result<()> {
        let found = self.file.metadata().map_err(|error| unreadable(&self.path, 0, Bytes::ZERO, &error))?;
        let now = Identity::of(&found);
        if now == self.identity {
            return Ok(());
        }
        let (before, after) = (Bytes(self.identity.size), Bytes(now.size));
        let written = self.identity.written;
        Err(HostError::FileChanged { path: self.path.clone(), before, after, written })
    }

    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }
}

/// Bytes of a file that are read when they are needed.
#[derive(Clone)]
pub struct FileBytes {
    file: Arc<SourceFile>,
    offset: u64,
    size: Bytes,
}

impl FileBytes {
    /// `size` bytes of `file` from `offset` on.
    ///
    /// # Errors
    /// [`HostError::OutsideFile`] if the file was shorter than that when it was opened.
    pub fn new(file: &Arc<SourceFile>, offset: u64, size: Bytes) -> Result<Self> {
        let end = offset.saturating_add(size.0);
        if end > file.size().0 {
            return Err(HostError::OutsideFile { path: file.path.clone(), offset, end, size: file.size() });
        }
        Ok(Self { file: Arc::clone(file), offset, size })
    }

    /// The file.
    pub fn file(&self) -> &Arc<SourceFile> {
        &self.file
    }

    /// Where in the file they begin.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many there are.
    pub fn size(&self) -> Bytes {
        self.size
    }

    /// Reads bytes from `skip` on until `target` is full.
    ///
    /// # Errors
    /// [`HostError::FileChanged`] if the file is not what it was, [`HostError::FileRead`] if the system fails; `target`
    /// holds anything then.
    pub fn read_at(&self, skip: u64, target: &mut [u8]) -> Result<()> {
        let size = Bytes(target.len() as u64);
        if skip.saturating_add(size.0) > self.size.0 {
            let end = self.offset.saturating_add(skip).saturating_add(size.0);
            let offset = self.offset.saturating_add(skip);
            let size = Bytes(self.offset + self.size.0);
            return Err(HostError::OutsideFile { path: self.file.path.clone(), offset, end, size });
        }
        let offset = self.offset + skip;
        match self.file.file.read_exact_at(target, offset) {
            // Of a page that is being cut the end reads zeros, and nothing comes up short.
            Ok(()) => self.file.check_unchanged(),
            Err(error) => self.failed(skip, size, &error),
        }
    }

    /// What a read of `size` bytes from `skip` on has failed with. A file may be cut between any check and the read: what came up
    /// short says which of the two it is.
    pub(crate) fn failed(&self, skip: u64, size: Bytes, error: &std::io::Error) -> Result<()> {
        let offset = self.offset.saturating_add(skip);
        self.file.check_unchanged().and(Err(unreadable(&self.file.path, offset, size, error)))
    }

    /// `size` bytes from `skip` on. The caller has checked the bounds.
    pub(crate) fn part(&self, skip: u64, size: Bytes) -> Self {
        debug_assert!(skip + size.0 <= self.size.0, "a part lies inside its whole");
        Self { file: Arc::clone(&self.file), offset: self.offset + skip, size }
    }
}

impl fmt::Debug for FileBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {} of {}", self.size, self.offset, self.file.path.display())
    }
}

fn unreadable(path: &Path, offset: u64, size: Bytes, error: &std::io::Error) -> HostError {
    HostError::FileRead { path: path.to_path_buf(), offset, size, message: error.to_string() }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(bytes: &[u8]) -> (tempfile::NamedTempFile, Arc<SourceFile>) {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        let opened = SourceFile::open(file.path()).unwrap();
        (file, opened)
    }

    #[test]
    fn bytes_are_read_where_they_are() {
        let (_file, opened) = file(b"0123456789");
        let bytes = FileBytes::new(&opened, 2, Bytes(6)).unwrap();
        let mut found = [0; 3];
        bytes.read_at(1, &mut found).unwrap();
        assert_eq!(&found, b"345");
        bytes.part(4, Bytes(2)).read_at(1, &mut found[..1]).unwrap();
        assert_eq!(found[0], b'7');
        assert!(matches!(
            bytes.read_at(4, &mut found),
            Err(HostError::OutsideFile { offset: 6, end: 9, .. })
        ));
        assert!(matches!(bytes.read_at(u64::MAX, &mut found), Err(HostError::OutsideFile { .. })));
    }

    #[test]
    fn what_a_file_does_not_have_is_refused() {
        let (_file, opened) = file(b"0123456789");
        assert!(FileBytes::new(&opened, 10, Bytes::ZERO).is_ok());
        for (offset, size) in [(10, 1), (0, 11), (u64::MAX, 1), (1, u64::MAX)] {
            let refused = FileBytes::new(&opened, offset, Bytes(size)).unwrap_err();
            assert!(matches!(refused, HostError::OutsideFile { size: Bytes(10), .. }), "{refused}");
        }
    }

    #[test]
    fn a_file_cut_short_is_an_error() {
        let (file, opened) = file(b"0123456789");
        opened.check_unchanged().unwrap();
        file.as_file().set_len(5).unwrap();
        let changed = opened.check_unchanged().unwrap_err();
        assert!(
            matches!(changed, HostError::FileChanged { before: Bytes(10), after: Bytes(5), .. }),
            "{changed}"
        );
        let bytes = FileBytes::new(&opened, 3, Bytes(4)).unwrap();
        let mut found = [0; 4];
        assert!(matches!(bytes.read_at(0, &mut found), Err(HostError::FileChanged { after: Bytes(5), .. })));
    }

    #[test]
    fn a_file_written_to_has_changed_and_a_renamed_one_has_not() {
        let (file, opened) = file(b"0123456789");
        let moved = file.path().with_extension("moved");
        std::fs::rename(file.path(), &moved).unwrap();
        opened.check_unchanged().unwrap();
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        file.as_file().set_modified(later).unwrap();
        assert!(matches!(opened.check_unchanged(), Err(HostError::FileChanged { .. })));
        // Nothing comes up short, and the bytes need not be those that the model was made of.
        let bytes = FileBytes::new(&opened, 3, Bytes(4)).unwrap();
        assert!(matches!(bytes.read_at(0, &mut [0; 4]), Err(HostError::FileChanged { .. })));
        std::fs::remove_file(moved).unwrap();
    }

    #[test]
    fn a_touched_file_is_refused_with_the_way_out_and_taken_with_its_time_back() {
        let (file, opened) = file(b"0123456789");
        let (found, bytes) =
            (file.as_file().metadata().unwrap(), FileBytes::new(&opened, 3, Bytes(4)).unwrap());
        let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
        file.as_file().set_modified(later).unwrap();
        let said = bytes.read_at(0, &mut [0; 4]).unwrap_err().to_string();
        let time = format!("touch -d @{}.{:09}", found.mtime(), found.mtime_nsec());
        assert!(said.contains("written to or touched") && said.contains("load the model again"), "{said}");
        assert!(said.ends_with(&time), "{said}");
        file.as_file().set_modified(found.modified().unwrap()).unwrap();
        bytes.read_at(0, &mut [0; 4]).unwrap();
        // A cut one has no such way.
        file.as_file().set_len(9).unwrap();
        let said = opened.check_unchanged().unwrap_err().to_string();
        assert!(said.ends_with("it had 10 bytes, it has 9 bytes; load the model again"), "{said}");
    }
}
