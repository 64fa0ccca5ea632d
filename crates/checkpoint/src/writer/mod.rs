//! Writes safetensors files: whole or not at all, tensor by tensor, with the data aligned for direct reading.
//!
//! ```text
//! | length: u64 | JSON | spaces up to the alignment | tensor | tensor | … |        no gap between tensors
//! ```
//!
//! The header is known before the first tensor's bytes are, so that no more than a piece of one tensor is ever in RAM. The
//! file is written under another name in the same folder, made durable and renamed: until then, and after any failure, what
//! was there before is there still. A symbolic link is replaced, not what it points to.

mod plan;
mod problem;
mod target;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use ::safetensors::Dtype;

use self::plan::Plan;
use self::target::Target;
use crate::{Cancel, CheckpointError, Result};

pub use plan::{Order, TensorSpec};
pub use problem::WriteProblem;

/// Bytes written between two looks at the cancel flag: some milliseconds of work.
const PIECE: usize = 4 << 20;
/// The default alignment: a page, and the largest that disks ask for.
const ALIGNMENT: u64 = 4096;

/// Is told how many bytes of the file are written.
pub type Progress = Arc<dyn Fn(u64) + Send + Sync>;

/// How to write.
#[derive(Clone)]
pub struct WriteOptions {
    /// Text for the header. `format: pt` is added unless there is a `format`. See
    /// [`ModelMetadata`](crate::ModelMetadata) for what models keep there.
    pub metadata: BTreeMap<String, String>,
    /// What the start of the data is a multiple of, a power of two. 4096.
    pub alignment: u64,
    /// In which order tensors lie.
    pub order: Order,
    /// Stops the writing from outside: nothing is left of it.
    pub cancel: Option<Cancel>,
    /// Is called after each piece.
    pub progress: Option<Progress>,
}

impl Default for WriteOptions {
    fn default() -> Self {
        let order = Order::default();
        Self { metadata: BTreeMap::new(), alignment: ALIGNMENT, order, cancel: None, progress: None }
    }
}

impl fmt::Debug for WriteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteOptions")
            .field("metadata", &self.metadata.len())
            .field("alignment", &self.alignment)
            .field("order", &self.order)
            .finish_non_exhaustive()
    }
}

/// A tensor to be written, with its bytes.
#[derive(Debug, Clone, Copy)]
pub struct TensorOut<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, slowest first.
    pub shape: &'a [u64],
    /// Its elements, little endian.
    pub bytes: &'a [u8],
}

/// Writes tensors that are all in memory.
///
/// ```
/// use checkpoint::{TensorOut, WriteOptions, write};
/// use safetensors::{Dtype, SafeTensors};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("model.safetensors");
/// let weight = TensorOut { name: "weight", dtype: Dtype::U8, shape: &[2, 2], bytes: &[1, 2, 3, 4] };
/// write(&path, &[weight], &WriteOptions::default())?;
///
/// let file = std::fs::read(&path)?;
/// assert_eq!(SafeTensors::deserialize(&file)?.tensor("weight")?.data(), [1, 2, 3, 4]);
/// assert_eq!(file.len(), 4096 + 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn write(path: &Path, tensors: &[TensorOut<'_>], options: &WriteOptions) -> Result<()> {
    let spec = |tensor: &TensorOut<'_>| TensorSpec {
        name: tensor.name.to_owned(),
        dtype: tensor.dtype,
        shape: tensor.shape.to_vec(),
    };
    let mut writer = Writer::create(path, tensors.iter().map(spec).collect(), options)?;
    for index in writer.order().to_vec() {
        writer.write(index, tensors[index].bytes)?;
    }
    writer.finish()
}

/// A file being written, whose tensors' bytes come one after the other. Dropped before [`Writer::finish`], it leaves
/// nothing behind.
pub struct Writer {
    target: Target,
    plan: Plan,
    specs: Vec<TensorSpec>,
    /// Bytes of each tensor that were written.
    written: Vec<u64>,
    total: u64,
    cancel: Option<Cancel>,
    progress: Option<Progress>,
}

impl Writer {
    /// Begins a file: lays it out, takes its room on disk, writes the header. Refuses what could not be read again.
    pub fn create(path: &Path, specs: Vec<TensorSpec>, options: &WriteOptions) -> Result<Self> {
        let plan = Plan::new(path, &specs, &options.metadata, options.alignment, options.order)?;
        check(options.cancel.as_ref())?;
        let target = Target::create(path, plan.size)?;
        target.write_at(0, &plan.header)?;
        let total = plan.header.len() as u64;
        Ok(Self {
            target,
            written: vec![0; specs.len()],
            plan,
            specs,
            total,
            cancel: options.cancel.clone(),
            progress: options.progress.clone(),
        })
    }

    /// The tensors, by the number they were announced under, in the order of their bytes in the file. To write them in this
    /// order is fastest.
    pub fn order(&self) -> &[usize] {
        &self.plan.order
    }

    /// Bytes of the file when it is complete.
    pub fn size(&self) -> u64 {
        self.plan.size
    }

    /// Bytes of a tensor, by its number.
    pub fn bytes(&self, index: usize) -> Option<u64> {
        self.plan.places.get(index).map(|place| place.bytes)
    }

    /// Writes the next bytes of a tensor, which may come in pieces. Tensors may come in any order.
    ///
    /// After an error the file cannot be completed; drop the writer.
    pub fn write(&mut self, index: usize, bytes: &[u8]) -> Result<()> {
        let Some(place) = self.plan.places.get(index).copied() else {
            let count = self.specs.len();
            return self.refuse(WriteProblem::NoTensor { index, count });
        };
        let given = self.written[index] + bytes.len() as u64;
        if given > place.bytes {
            let tensor = self.specs[index].name.clone();
            return self.refuse(WriteProblem::TooManyBytes { tensor, bytes: place.bytes, given });
        }
        for piece in bytes.chunks(PIECE) {
            check(self.cancel.as_ref())?;
            self.target.write_at(place.start + self.written[index], piece)?;
            self.written[index] += piece.len() as u64;
            self.total += piece.len() as u64;
            if let Some(progress) = &self.progress {
                progress(self.total);
            }
        }
        Ok(())
    }

    /// Makes the file durable and puts it in its place. Refused if bytes are missing. A cancellation is heard while the disk
    /// takes its time, too.
    pub fn finish(self) -> Result<()> {
        let short =
            self.plan.places.iter().zip(&self.written).position(|(place, written)| *written < place.bytes);
        if let Some(index) = short {
            let tensor = self.specs[index].name.clone();
            let (bytes, given) = (self.plan.places[index].bytes, self.written[index]);
            return self.refuse(WriteProblem::TooFewBytes { tensor, bytes, given });
        }
        check(self.cancel.as_ref())?;
        let cancel = self.cancel;
        self.target.finish(|| check(cancel.as_ref()))
    }

    fn refuse<T>(&self, problem: WriteProblem) -> Result<T> {
        Err(CheckpointError::Unwritable { path: self.target.path().to_owned(), problem: Box::new(problem) })
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer")
            .field("path", &self.target.path())
            .field("tensors", &self.specs.len())
            .field("written", &self.total)
            .field("size", &self.plan.size)
            .finish_non_exhaustive()
    }
}

fn check(cancel: Option<&Cancel>) -> Result<()> {
    cancel.map_or(Ok(()), Cancel::check)
}
