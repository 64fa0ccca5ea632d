//! A model: its files opened once, their headers checked and put together. No tensor's bytes are read.

mod build;
mod indexed;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use crate::gguf::GgufHeader;
use crate::{Limits, OpenFile, Result, TensorInfo};

/// How to open a checkpoint.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct OpenOptions {
    /// What headers may ask for.
    pub limits: Limits,
    /// Read files with bytes after their last tensor, with a note that counts them, instead of refusing them.
    pub allow_trailing: bool,
    /// Open exactly the files that are named: one shard is that shard alone, and folders and indexes are refused.
    pub exact_files: bool,
    /// Keep only tensors whose names begin with one of these; all if empty. Names stay whole.
    pub prefixes: Vec<String>,
}

/// A model in one or several files.
///
/// ```
/// # use std::fs;
/// use checkpoint::{Checkpoint, OpenOptions};
/// # let folder = tempfile::tempdir()?;
/// # let header = r#"{"layer.bias":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
/// # let path = folder.path().join("model.safetensors");
/// # fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &[0; 8]].concat())?;
///
/// let model = Checkpoint::open(&path, &OpenOptions::default())?;
/// let bias = model.get("layer.bias").expect("the model has a bias");
/// assert_eq!((bias.kind.to_string().as_str(), &bias.shape[..], bias.bytes()), ("F32", &[2][..], 8));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Checkpoint {
    files: Vec<Arc<OpenFile>>,
    /// By file.
    file_metadata: Vec<BTreeMap<String, String>>,
    /// By file; none for safetensors.
    gguf: Vec<Option<GgufHeader>>,
    tensors: Vec<TensorInfo>,
    /// Places in `tensors`, in the order of the names.
    by_name: Vec<u32>,
    metadata: BTreeMap<String, String>,
    notes: Vec<String>,
}

impl Checkpoint {
    /// Opens a model by one path: a file, the index of a sharded model, any shard of one named `-00001-of-00003`, or a
    /// folder that holds one model.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Self> {
        Self::open_files(&[path.as_ref()], options)
    }

    /// Opens several paths, each as [`Checkpoint::open`] would, as one model. A file that is given twice is read once.
    pub fn open_files(paths: &[impl AsRef<Path>], options: &OpenOptions) -> Result<Self> {
        let mut building = build::Building::default();
        for path in paths {
            building.add(path.as_ref(), options)?;
        }
        building.finish(options)
    }

    /// The tensors, file by file in the order of their bytes.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        let place = |i: &u32| self.tensors[*i as usize].name.as_str();
        let found = self.by_name.binary_search_by(|i| place(i).cmp(name)).ok()?;
        Some(&self.tensors[self.by_name[found] as usize])
    }

    /// The metadata of all files. Where two files say different things for a key, the first file's word counts, and a
    /// note says so.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The metadata of one file, by its place in [`Checkpoint::files`].
    pub fn file_metadata(&self, file: usize) -> Option<&BTreeMap<String, String>> {
        self.file_metadata.get(file)
    }

    /// What a GGUF file says of itself, with the types that it says it in, by its place in [`Checkpoint::files`]. `None`
    /// for a safetensors file.
    pub fn gguf(&self, file: usize) -> Option<&GgufHeader> {
        self.gguf.get(file)?.as_ref()
    }

    /// The files, in the order that [`TensorInfo::file`] counts.
    pub fn files(&self) -> &[Arc<OpenFile>] {
        &self.files
    }

    /// The file that holds a tensor of this model.
    pub fn file_of(&self, tensor: &TensorInfo) -> Option<&Arc<OpenFile>> {
        self.files.get(tensor.file)
    }

    /// What was read past or left out, in words.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.tensors.iter().map(TensorInfo::bytes).sum()
    }
}
