//! Reading a chunk into its slot: from memory, through the page cache, or around it. Never through a mapping of a file, so
//! that a file cut short is an error and not a dead process.
//!
//! A file is read around the page cache (`O_DIRECT`) where the cache could not hold all that is streamed anyway: a
//! model larger than RAM, read from one end to the other every step, finds nothing there, and would push out what
//! others have. A file system that cannot do that, and a tail that is no whole page, are read through the cache.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpu_driver::Bytes;
use rustix::fs::OFlags;

use super::cut::{Chunk, DIRECT_LEAST, Read};
use crate::error::{HostError, Result};
use crate::file::{FileBytes, SourceFile};
use crate::limits::memory_limit;
use crate::source::SourceBytes;
use crate::system;

/// A file that is read around the page cache while that works.
#[derive(Debug)]
pub(super) struct DirectFile {
    file: File,
    works: AtomicBool,
}

/// The files of one model that are read around the page cache: each opened once.
#[derive(Debug, Default)]
pub(super) struct DirectFiles(Vec<(Arc<SourceFile>, Option<Arc<DirectFile>>)>);

impl DirectFiles {
    /// The file of these bytes, if it can be opened that way and they are worth it.
    pub(super) fn of(&mut self, bytes: &SourceBytes) -> Option<Arc<DirectFile>> {
        let file = bytes.file().filter(|bytes| bytes.size().0 >= DIRECT_LEAST)?.file();
        if let Some((_, known)) = self.0.iter().find(|(known, _)| Arc::ptr_eq(known, file)) {
            return known.clone();
        }
        let opened = open_direct(file.file());
        let opened = opened.map(|file| Arc::new(DirectFile { file, works: AtomicBool::new(true) }));
        self.0.push((Arc::clone(file), opened.clone()));
        opened
    }
}

/// Opens a file once more for reading around the page cache, whatever has become of its name; `None` if its file system
/// cannot do that.
fn open_direct(file: &File) -> Option<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let flags = OFlags::DIRECT.bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(path).ok()
}

/// Whether the page cache can hold `bytes` of files that are read over and over, with room for what else runs.
pub(super) fn cache_holds(bytes: Bytes) -> bool {
    let text = system::read_text(Path::new(system::MEMORY_INFO)).unwrap_or_default();
    let available = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = available.and_then(|value| value.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    // A reader pushes out its own pages first where the last tenth is short; and a control group counts its page cache.
    let free = kib.is_none_or(|kib| bytes.0 / 9 * 10 <= kib << 10);
    free && memory_limit().is_none_or(|limit| bytes.0 / 3 * 4 <= limit.0)
}

/// Does the reads of a chunk, in order. `direct` has an entry for each of them.
pub(super) fn fill(chunk: &Chunk, direct: &[Option<Arc<DirectFile>>], slot: &mut [u8]) -> Result<()> {
    for (read, direct) in chunk.reads.iter().zip(direct) {
        match &read.bytes {
            SourceBytes::Memory(bytes) => target(slot, read).copy_from_slice(bytes.as_slice()),
            SourceBytes::File(bytes) => {
                from_file(bytes, read, direct.as_deref(), slot)
                    .map_err(|cause| HostError::Unread { offset: read.offset, cause: Box::new(cause) })?;
            }
        }
    }
    Ok(())
}

/// Reads bytes of a file that is what it was when the model was loaded, which `read_at` asks at the end.
fn from_file(bytes: &FileBytes, read: &Read, direct: Option<&DirectFile>, slot: &mut [u8]) -> Result<()> {
    let done = match direct.filter(|direct| direct.works.load(Ordering::Relaxed)) {
        Some(direct) => around_cache(direct, bytes, read.at, slot)?,
        None => 0,
    };
    bytes.read_at(done, &mut target(slot, read)[done as usize..])
}

fn target<'a>(slot: &'a mut [u8], read: &Read) -> &'a mut [u8] {
    &mut slot[read.at as usize..][..read.bytes.size().as_usize()]
}

/// How many of the bytes were read; the others are to be read through the page cache.
fn around_cache(direct: &DirectFile, bytes: &FileBytes, at: u64, slot: &mut [u8]) -> Result<u64> {
    let read = |target: &mut [u8], offset| direct.file.read_at(target, offset);
    let stretch = (bytes.offset(), bytes.size().0, at);
    match whole_pages(read, stretch, slot, system::page_size()) {
        Ok(done) => Ok(done),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
            direct.works.store(false, Ordering::Relaxed);
            Ok(0)
        }
        Err(error) => bytes.failed(0, bytes.size(), &error).map(|()| 0),
    }
}

/// Reads the pages of a file around `size` bytes at `offset` into the pages around `at` of the slot, which lies in its page
/// as `offset` does; how many of the bytes were read, in whole pages until something was short.
fn whole_pages(
    mut read: impl FnMut(&mut [u8], u64) -> io::Result<usize>,
    (offset, size, at): (u64, u64, u64),
    slot: &mut [u8],
    page: u64,
) -> io::Result<u64> {
    let lead = offset % page;
    debug_assert_eq!(lead, at % page, "bytes lie in the slot's page as in the file's");
    let whole = (lead + size).next_multiple_of(page);
    let mut done = 0;
    while done < lead + size {
        let target = &mut slot[(at - lead + done) as usize..(at - lead + whole) as usize];
        match read(target, offset - lead + done) {
            Ok(count) if done + count as u64 >= lead + size => return Ok(size),
            Ok(count) if (count as u64) < page => break,
            Ok(count) => done += count as u64 / page * page,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done.saturating_sub(lead).min(size))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 512;

    /// A reader of `file` whose `n`th call gives at most `short[n]` bytes; none is an interruption.
    fn reader(file: &[u8], short: &[Option<usize>]) -> impl FnMut(&mut [u8], u64) -> io::Result<usize> {
        let mut calls = 0;
        move |target, offset| {
            assert!(offset.is_multiple_of(PAGE) && target.len().is_multiple_of(PAGE as usize));
            calls += 1;
            let Some(most) = short.get(calls - 1).copied().unwrap_or(Some(usize::MAX)) else {
                return Err(io::ErrorKind::Interrupted.into());
            };
            let rest = file.get(offset as usize..).unwrap_or(&[]);
            let count = rest.len().min(target.len()).min(most);
            target[..count].copy_from_slice(&rest[..count]);
            Ok(count)
        }
    }

    proptest! {
        #[test]
        fn short_reads_and_interruptions_give_the_same_bytes(
            offset in 0_u64..3000, size in 1_u64..5000, place in 0_u64..4, cut in 0_usize..6000,
            short in proptest::collection::vec(proptest::option::of(0_usize..2000), 0..8),
        ) {
            let file: Vec<u8> = (0..9000_u32).map(|i| (i * 7 % 251) as u8).collect();
            let file = &file[..file.len() - cut.min(file.len())];
            let at = place * PAGE + offset % PAGE;
            let mut slot = vec![0; 8192];
            let done = whole_pages(reader(file, &short), (offset, size, at), &mut slot, PAGE).unwrap();
            prop_assert!(done <= size);
            let (at, offset) = (at as usize, offset as usize);
            prop_assert_eq!(&slot[at..at + done as usize], &file[offset..offset + done as usize]);
            if short.iter().all(Option::is_none) && offset + size as usize <= file.len() {
                prop_assert_eq!(done, size);
            }
        }
    }

    #[test]
    fn an_error_comes_out() {
        let fails = |_: &mut [u8], _| Err(io::Error::from_raw_os_error(5));
        let error = whole_pages(fails, (0, 100, 0), &mut [0; 512], PAGE).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(5));
    }

    #[test]
    fn what_fits_the_machine_fits_its_page_cache() {
        assert!(cache_holds(Bytes::mib(1)));
        assert!(!cache_holds(Bytes(1 << 60)));
    }
}
