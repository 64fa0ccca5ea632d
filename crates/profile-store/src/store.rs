//! The protocol: readers take no lock and see whole files only; writers merge under the folder's lock into a new file, which is
//! on the disk before it gets the record's name.

use std::io;
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::{About, Notice, Result, StoreError};
use crate::folder::{Content, Disk, Folder};
use crate::identity::Identity;
use crate::record::{Decoded, Record};
use crate::rules::{Kind, PROFILE};
use crate::{location, time};

/// The largest file that is read or written. Twenty observations take some 20 KiB.
pub const LIMIT: u64 = 8 << 20;
/// How long a writer waits for the lock. A write holds it for some milliseconds.
pub const WAIT: Duration = Duration::from_secs(10);
/// How long a reader that found a bad file waits to set it aside. If it may not, the next writer does.
const READER_WAIT: Duration = Duration::from_millis(200);
/// How files begin and end that were not finished.
const UNFINISHED: (&str, &str) = (".", ".tmp");

/// A folder of records.
#[derive(Debug, Clone)]
pub struct Store<F = Disk> {
    folder: F,
    kinds: &'static [Kind],
    wait: Duration,
}

/// What could be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Loaded {
    /// The record; `None` if there is none that can be used.
    pub record: Option<Record>,
    /// What was wrong.
    pub notices: Vec<Notice>,
}

impl Store<Disk> {
    /// The profiles of workloads, in the folder that is theirs now: see [`default_folder`](location::default_folder).
    pub fn profiles() -> Result<Self> {
        Ok(Self::new(Disk::new(location::default_folder()?), PROFILE))
    }

    /// The profiles of workloads in another folder.
    pub fn at(path: impl Into<std::path::PathBuf>) -> Self {
        Self::new(Disk::new(path), PROFILE)
    }
}

impl<F: Folder> Store<F> {
    /// A store of these kinds of entries.
    pub fn new(folder: F, kinds: &'static [Kind]) -> Self {
        Self { folder, kinds, wait: WAIT }
    }

    /// Waits this long for the lock instead.
    #[must_use]
    pub fn waiting(mut self, wait: Duration) -> Self {
        self.wait = wait;
        self
    }

    /// The folder's path.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Reads a record. Whatever is in the folder, this is no error: what cannot be used is missing, and a notice says why.
    /// A file that is no record is set aside.
    pub fn load(&self, identity: &Identity) -> Loaded {
        match self.read(identity) {
            Ok(Decoded::Bad(reason)) => self.discard(identity, reason),
            Ok(decoded) => loaded(decoded),
            Err(error) => nothing(None, format!("cannot read it: {error}")),
        }
    }

    /// Reads again under the lock, and sets the file aside if it is still bad: a writer may have mended it meanwhile.
    fn discard(&self, identity: &Identity, reason: String) -> Loaded {
        let Ok(Some(lock)) = self.folder.lock(READER_WAIT) else { return nothing(None, reason) };
        let found = match self.read(identity) {
            Ok(Decoded::Bad(reason)) => {
                let moved = self.set_aside(identity, &reason).ok();
                nothing(moved, reason)
            }
            Ok(decoded) => loaded(decoded),
            Err(error) => nothing(None, format!("cannot read it: {error}")),
        };
        drop(lock);
        found
    }

    /// Changes a record under the lock: `change` gets what is in the file now, or an empty record. When this returns, the change
    /// is on the disk; when it fails, or the process dies meanwhile, the file is as before.
    ///
    /// Also returns what was wrong with the file that was there.
    pub fn update(
        &self,
        identity: &Identity,
        change: impl FnOnce(&mut Record) -> Result<()>,
    ) -> Result<(Record, Vec<Notice>)> {
        self.io("make the folder", self.folder.prepare())?;
        let lock = self.io("take the lock", self.folder.lock(self.wait))?;
        let Some(lock) = lock else {
            return Err(StoreError::Locked { folder: self.path().to_owned(), waited: self.wait });
        };
        self.io("remove unfinished files", self.sweep())?;
        let mut notices = Vec::new();
        let mut record = match self.io("read the record", self.read(identity))? {
            Decoded::Record(record, found) => {
                notices = found;
                record
            }
            Decoded::Newer(version) => {
                return Err(StoreError::Newer { file: identity.file_name(), version });
            }
            Decoded::Missing => Record::empty(identity, self.kinds),
            Decoded::Bad(reason) => {
                let moved = self.io("set a bad file aside", self.set_aside(identity, &reason))?;
                notices.extend(nothing(Some(moved), reason).notices);
                Record::empty(identity, self.kinds)
            }
        };
        change(&mut record)?;
        record.stamp(time::now());
        let text = record.encode();
        if text.len() as u64 > LIMIT {
            return Err(StoreError::TooLarge { bytes: text.len() as u64, limit: LIMIT });
        }
        let name = unique(identity.key());
        let written = self
            .folder
            .write_new(&name, text.as_bytes())
            .and_then(|()| self.folder.rename(&name, &identity.file_name()));
        if written.is_err() {
            // What could not be written is removed now, or by the next writer.
            let _ = self.folder.remove(&name);
        }
        self.io("write the record", written)?;
        self.io("flush the folder", self.folder.sync())?;
        drop(lock);
        Ok((record, notices))
    }

    fn read(&self, identity: &Identity) -> io::Result<Decoded> {
        Ok(match self.folder.read(&identity.file_name(), LIMIT)? {
            Content::Bytes(bytes) => Record::decode(&bytes, identity, self.kinds),
            Content::Missing => Decoded::Missing,
            Content::TooLarge(bytes) => {
                Decoded::Bad(format!("it has {bytes} bytes, and records have {LIMIT} at most"))
            }
            Content::NoFile => Decoded::Bad("it is no file".into()),
        })
    }

    /// Under the lock: gives a bad file another name, with its reason in a file beside it.
    fn set_aside(&self, identity: &Identity, reason: &str) -> io::Result<String> {
        let name = unique(identity.key());
        let name = name.trim_start_matches(UNFINISHED.0).trim_end_matches(UNFINISHED.1);
        let name = format!("{name}.bad");
        self.folder.rename(&identity.file_name(), &name)?;
        // The reason is for people; the file is aside without it too.
        let _ = self.folder.write_new(&format!("{name}.reason"), format!("{reason}\n").as_bytes());
        Ok(name)
    }

    /// Under the lock: every unfinished file is a dead writer's.
    fn sweep(&self) -> io::Result<()> {
        let (start, end) = UNFINISHED;
        for name in self.folder.names()?.iter().filter(|name| name.starts_with(start) && name.ends_with(end))
        {
            self.folder.remove(name)?;
        }
        Ok(())
    }

    fn io<T>(&self, act: &'static str, outcome: io::Result<T>) -> Result<T> {
        outcome.map_err(|source| StoreError::Io { act, folder: self.path().to_owned(), source })
    }
}

fn loaded(decoded: Decoded) -> Loaded {
    match decoded {
        Decoded::Record(record, notices) => Loaded { record: Some(record), notices },
        Decoded::Newer(version) => {
            let reason = "its shape is not known to this program; it was left as it is".into();
            Loaded { record: None, notices: vec![Notice { about: About::Version { version }, reason }] }
        }
        Decoded::Missing => Loaded { record: None, notices: Vec::new() },
        Decoded::Bad(reason) => nothing(None, reason),
    }
}

fn nothing(moved_to: Option<String>, reason: String) -> Loaded {
    Loaded { record: None, notices: vec![Notice { about: About::File { moved_to }, reason }] }
}

/// A name that no other file has: of this process, this moment and this call.
fn unique(key: &str) -> String {
    static CALLS: AtomicU64 = AtomicU64::new(0);
    let call = CALLS.fetch_add(1, Ordering::Relaxed);
    let moment = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
    let (start, end) = UNFINISHED;
    format!("{start}{key}.{}-{call}-{moment:x}{end}", process::id())
}
