//! Bytes of a mapped file: which of them the process has changed, and how to read them as they are now.
#![forbid(unsafe_code)]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use super::{FileMap, pages};
use crate::error::Result;
use crate::io::OpenFile;

/// A range of a file that a live [`FileMap`] shows at a range of addresses. It keeps the mapping alive.
#[derive(Debug, Clone)]
pub struct FileSpan {
    map: Arc<FileMap>,
    range: Range<u64>,
}

impl FileSpan {
    /// `range` must lie within the map.
    pub(super) fn new(map: Arc<FileMap>, range: Range<u64>) -> Self {
        Self { map, range }
    }

    /// The file.
    pub fn file(&self) -> &Arc<OpenFile> {
        self.map.file()
    }

    /// The mapping.
    pub fn map(&self) -> &Arc<FileMap> {
        &self.map
    }

    /// The first byte's place in the file.
    pub fn offset(&self) -> u64 {
        self.range.start
    }

    /// How many bytes there are.
    pub fn size(&self) -> u64 {
        self.range.end - self.range.start
    }

    /// The bytes in pages that were written to since the file was mapped, as ranges within this span: sorted, apart.
    ///
    /// Pages are whole: the neighbours of a changed byte count as changed. So does everything where the system does not
    /// tell, and a page that was swapped out. Writes made while this runs may be seen or not.
    pub fn modified(&self) -> Vec<Range<u64>> {
        let base = self.map.addresses().start;
        let start = base + self.range.start as usize;
        match pages::written_runs(&(start..base + self.range.end as usize)) {
            Ok(runs) => {
                runs.into_iter().map(|run| (run.start - start) as u64..(run.end - start) as u64).collect()
            }
            Err(error) => {
                tracing::debug!(%error, "changed pages cannot be told; every page counts as changed");
                if self.size() == 0 { Vec::new() } else { vec![Range { start: 0, end: self.size() }] }
            }
        }
    }

    /// Whether no page of it was written to: the file's bytes are its bytes.
    pub fn is_unmodified(&self) -> bool {
        self.modified().is_empty()
    }

    /// Fills `target` with the bytes from `at` on, as the process sees them: changed pages from memory, all others from
    /// the file. A file that was cut meanwhile is an error that names `what`, never the end of the process.
    pub fn read(&self, what: &str, at: u64, target: &mut [u8]) -> Result<()> {
        let size = target.len() as u64;
        if at.checked_add(size).is_none_or(|end| end > self.size()) {
            return Err(crate::CheckpointError::OutsideFile {
                path: self.file().path().to_owned(),
                what: what.to_owned(),
                offset: self.offset().saturating_add(at),
                asked: size,
                size: self.range.end,
            });
        }
        let part = Self { map: Arc::clone(&self.map), range: self.offset() + at..self.offset() + at + size };
        let runs = part.modified();
        let mut done = 0;
        for run in &runs {
            self.file().read_exact_at_for(what, part.offset() + done, within(target, done..run.start))?;
            part.read_memory(what, run.start, within(target, run.clone()))?;
            done = run.end;
        }
        self.file().read_exact_at_for(what, part.offset() + done, within(target, done..size))
    }

    /// Copies from memory in a way that a page gone meanwhile fails: even a changed page goes when its file is cut.
    fn read_memory(&self, what: &str, at: u64, target: &mut [u8]) -> Result<()> {
        let failed = |source: io::Error| self.file().failed(what, self.offset() + at, source);
        let memory = File::open("/proc/self/mem").map_err(failed)?;
        let address = self.map.addresses().start as u64 + self.offset() + at;
        memory.read_exact_at(target, address).map_err(failed)
    }
}

fn within(target: &mut [u8], range: Range<u64>) -> &mut [u8] {
    &mut target[range.start as usize..range.end as usize]
}
