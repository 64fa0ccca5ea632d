//! Model files, as Python sees them: their tensors' places, private mappings of them, and reads into given memory.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 converts lists into owned values")]

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use checkpoint::io::{IoMode, ReadJob, ReadOptions};
use checkpoint::{Checkpoint as Opened, FileMap, OpenFile, OpenOptions, TensorInfo, file_span};
use pyo3::prelude::*;

use crate::dlpack;
use crate::error::{Class, Failure, guarded};
use crate::watched::watched;

/// A tensor as Python sees it: name, type, shape, file, offset in it, bytes.
type Entry = (String, String, Vec<u64>, usize, u64, u64);

/// The files of one model, opened once, their headers read.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Checkpoint {
    files: Vec<Arc<OpenFile>>,
    tensors: Vec<TensorInfo>,
    by_name: HashMap<String, usize>,
    metadata: Vec<BTreeMap<String, String>>,
    notes: Vec<String>,
    /// By file: mapped when its first tensor is asked for, and for as long as a tensor or this lives.
    maps: Mutex<Vec<Option<Arc<FileMap>>>>,
}

impl Checkpoint {
    fn of(opened: &Opened) -> Self {
        let files = opened.files().to_vec();
        let tensors = opened.tensors().to_vec();
        let of_file = |file| opened.file_metadata(file).cloned().unwrap_or_default();
        Self {
            by_name: tensors.iter().enumerate().map(|(at, tensor)| (tensor.name.clone(), at)).collect(),
            metadata: (0..files.len()).map(of_file).collect(),
            maps: Mutex::new(vec![None; files.len()]),
            notes: opened.notes().to_vec(),
            tensors,
            files,
        }
    }

    fn tensor(&self, name: &str) -> Result<&TensorInfo, Failure> {
        let found = self.by_name.get(name).map(|at| &self.tensors[*at]);
        found.ok_or_else(|| Failure::new(Class::Checkpoint, format!("there is no tensor {name:?}")))
    }

    fn map_of(&self, file: usize) -> Result<Arc<FileMap>, Failure> {
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = &maps[file] {
            return Ok(Arc::clone(map));
        }
        let map = FileMap::private(&self.files[file])?;
        maps[file] = Some(Arc::clone(&map));
        Ok(map)
    }
}

#[pymethods]
impl Checkpoint {
    #[staticmethod]
    #[pyo3(signature = (paths, *, allow_trailing = false, exact = false))]
    fn open(py: Python<'_>, paths: Vec<PathBuf>, allow_trailing: bool, exact: bool) -> PyResult<Self> {
        Ok(py.detach(move || {
            guarded(|| {
                let mut options = OpenOptions::default();
                options.allow_trailing = allow_trailing;
                options.exact_files = exact;
                Ok(Self::of(&Opened::open_files(&paths, &options)?))
            })
        })?)
    }

    fn entries(&self) -> Vec<Entry> {
        let entry = |tensor: &TensorInfo| {
            let (kind, shape) = (tensor.kind.to_string(), tensor.shape.clone());
            (tensor.name.clone(), kind, shape, tensor.file, tensor.range.start, tensor.bytes())
        };
        self.tensors.iter().map(entry).collect()
    }

    fn metadata(&self) -> Vec<BTreeMap<String, String>> {
        self.metadata.clone()
    }

    fn files(&self) -> Vec<OsString> {
        self.files.iter().map(|file| file.path().to_owned().into_os_string()).collect()
    }

    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }

    fn map<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let tensor = self.tensor(name)?;
        dlpack::mapped_capsule(py, self.map_of(tensor.file)?, tensor.range.clone())
    }

    #[pyo3(signature = (targets, watch = None, *, io = "auto"))]
    fn read(
        &self,
        py: Python<'_>,
        targets: Vec<(String, u64, u64)>,
        watch: Option<&Bound<'_, PyAny>>,
        io: &str,
    ) -> PyResult<String> {
        let mode: IoMode = serde_json::from_value(io.into())
            .map_err(|_| Failure::new(Class::Checkpoint, format!("there is no way {io:?} to read files")))?;
        let mut jobs = Vec::with_capacity(targets.len());
        for (name, address, size) in &targets {
            let tensor = self.tensor(name)?;
            if tensor.bytes() != *size {
                let text = format!("{name} has {} bytes and {size} were asked for", tensor.bytes());
                return Err(Failure::new(Class::Internal, text).into());
            }
            let target = dlpack::bytes_mut(*address, *size);
            jobs.push(ReadJob { name, file: &self.files[tensor.file], offset: tensor.range.start, target });
        }
        let report = watched(py, watch, move |cancel, done| {
            let count = |bytes| {
                done.fetch_add(bytes, Ordering::Relaxed);
            };
            let options = ReadOptions { mode, threads: 0, cancel: Some(cancel), progress: Some(&count) };
            checkpoint::io::read(&mut jobs, &options)
        })?;
        serde_json::to_string(&report)
            .map_err(|error| Failure::new(Class::Internal, error.to_string()).into())
    }
}

/// The file and offset behind a tensor's bytes, if all of them lie in one mapped file.
#[pyfunction]
pub(crate) fn mapped(address: u64, size: u64) -> Option<(OsString, u64)> {
    let span = file_span(std::ptr::with_exposed_provenance(address as usize), size)?;
    Some((span.file().path().to_owned().into_os_string(), span.offset()))
}

/// Raises if the file behind one of these tensors' bytes is no longer what it was when it was mapped. Reading those bytes
/// would then give others, or end the process.
#[pyfunction]
pub(crate) fn check_mapped(tensors: Vec<(String, u64, u64)>) -> PyResult<()> {
    for (name, address, size) in tensors {
        let span = file_span(std::ptr::with_exposed_provenance(address as usize), size);
        if let Some(Err(error)) = span.map(|span| span.file().check_unchanged()) {
            return Err(Failure::new(Class::Checkpoint, format!("{name} cannot be read: {error}")).into());
        }
    }
    Ok(())
}

/// Copies a mapped tensor's bytes, from the file where they are unchanged. False, and nothing done, if they are not of
/// a mapped file.
#[pyfunction]
pub(crate) fn read_mapped(
    py: Python<'_>,
    name: &str,
    address: u64,
    size: u64,
    target: u64,
) -> PyResult<bool> {
    let Some(span) = file_span(std::ptr::with_exposed_provenance(address as usize), size) else {
        return Ok(false);
    };
    let target = dlpack::bytes_mut(target, size);
    py.detach(|| guarded(|| Ok(span.read(name, 0, target)?)))?;
    Ok(true)
}

/// The size of a file, and the part of it that lies in the page cache; `None` where the system does not tell.
#[pyfunction]
pub(crate) fn resident_fraction(py: Python<'_>, path: PathBuf) -> PyResult<(u64, Option<f64>)> {
    Ok(py.detach(move || {
        guarded(|| {
            let file = OpenFile::open(&path)?;
            let size = file.size();
            Ok((size, file.resident_fraction(0..size)))
        })
    })?)
}
