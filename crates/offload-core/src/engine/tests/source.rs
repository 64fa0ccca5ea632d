//! A source of page-locked bytes, bytes in memory and bytes in a file, and what becomes of the file.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;
use std::time::SystemTime;

use gpu_driver::{Bytes, DeviceOrdinal};
use pinned_pool::{
    FileBytes, HostBytes, HostStore, HostStoreBuilder, LineRun, SourceBytes, SourceFile, SourceTensor,
};

use super::desc::{Level, Levels};
use crate::engine::{EngineError, Source, SourcePart};

/// Where the bytes of a test's model are.
#[derive(Debug)]
pub(super) struct Mixed {
    store: HostStore,
    staged: Vec<(u64, SourceBytes)>,
}

/// The file of a test's model.
#[derive(Debug)]
pub(super) struct ModelFile {
    file: tempfile::NamedTempFile,
    content: Vec<u8>,
    written: SystemTime,
}

impl ModelFile {
    /// Takes the file's second half away.
    pub(super) fn cut(&self) {
        self.file.as_file().set_len(self.content.len() as u64 / 2).unwrap();
    }

    /// Makes it what it was.
    pub(super) fn mend(&self) {
        std::fs::write(self.file.path(), &self.content).unwrap();
        self.file.as_file().set_modified(self.written).unwrap();
    }
}

impl Mixed {
    /// Takes tensors, each with its number and place on the line.
    pub(super) fn new(
        mut store: HostStoreBuilder,
        levels: Levels,
        tensors: Vec<(u32, u64, Arc<Vec<u8>>)>,
    ) -> Result<(Self, Option<ModelFile>), EngineError> {
        let (mut staged, mut content, mut in_file) = (Vec::new(), vec![9; 24], Vec::new());
        for (number, offset, bytes) in tensors {
            let size = bytes.len() as u64;
            let held = HostBytes::of(&bytes);
            match levels.of(number) {
                Level::Locked => {
                    store.place(&[SourceTensor::new(number, offset, held)])?;
                }
                Level::Memory => staged.push((offset, held.into())),
                Level::File => {
                    in_file.push((offset, content.len() as u64, size));
                    content.extend_from_slice(&bytes);
                }
            }
        }
        let mut kept = None;
        if !in_file.is_empty() {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(&content).unwrap();
            let source = SourceFile::open(file.path())?;
            for (offset, at, size) in in_file {
                staged.push((offset, FileBytes::new(&source, at, Bytes(size))?.into()));
            }
            let written = file.as_file().metadata().unwrap().modified().unwrap();
            kept = Some(ModelFile { file, content, written });
        }
        staged.sort_by_key(|(offset, _)| *offset);
        Ok((Self { store: store.finish()?, staged }, kept))
    }
}

impl Source for Mixed {
    fn parts(&self, line: &Range<u64>) -> Vec<SourcePart> {
        let mut runs = self.store.line_runs(line.clone());
        for (offset, bytes) in &self.staged {
            let (start, end) = ((*offset).max(line.start), (offset + bytes.size().0).min(line.end));
            if start < end {
                let bytes = bytes.part(start - offset, Bytes(end - start)).unwrap();
                runs.push(LineRun::Staged { offset: start, bytes });
            }
        }
        runs.sort_by_key(LineRun::offset);
        runs.into_iter().map(|run| SourcePart { run, reader: DeviceOrdinal(0) }).collect()
    }
}
