//! An adapter file as the caller read it: its header, and the values of its smallest tensors.

use std::collections::{BTreeMap, HashMap};

use checkpoint::safetensors::dtype_from_name;
use checkpoint::{Checkpoint, TensorInfo};

use crate::error::{LoraError, Result};

/// The most tensors a file may have: the bound of `checkpoint` for a header.
const MAX_TENSORS: usize = 200_000;

/// A tensor of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterTensor {
    /// Its key.
    pub key: String,
    /// Its type, as safetensors spells it.
    pub dtype: String,
    /// Its shape, slowest dimension first.
    pub shape: Vec<u64>,
}

impl AdapterTensor {
    /// Elements; `None` if no memory could hold them.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |all, n| all.checked_mul(*n))
    }

    /// Whether its type is one of numbers that adapters are made of.
    pub(crate) fn is_float(&self) -> bool {
        const FLOATS: [&str; 6] = ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"];
        FLOATS.contains(&self.dtype.as_str())
    }

    /// Whether its type is known at all.
    pub(crate) fn is_known(&self) -> bool {
        dtype_from_name(&self.dtype).is_some()
    }
}

/// What an adapter file says, its factors left where they are.
#[derive(Debug, Clone, Default)]
pub struct AdapterFile {
    tensors: Vec<AdapterTensor>,
    scalars: HashMap<String, f64>,
    metadata: BTreeMap<String, String>,
    config: Option<String>,
}

impl AdapterFile {
    /// A file of these tensors, in any order: what follows does not depend on it.
    pub fn new(tensors: impl IntoIterator<Item = AdapterTensor>) -> Result<Self> {
        let mut tensors: Vec<_> = tensors.into_iter().collect();
        if tensors.len() > MAX_TENSORS {
            return Err(LoraError::TooMany { what: "tensors", have: tensors.len(), limit: MAX_TENSORS });
        }
        tensors.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].key == pair[1].key) {
            return Err(LoraError::DuplicateKey { key: pair[0].key.clone() });
        }
        Ok(Self { tensors, ..Self::default() })
    }

    /// The header of an open file, with its metadata. `scalar` gives the value of a tensor of one element, of which there may be
    /// as many as layers; what it does not give is refused where it is needed.
    pub fn of_checkpoint(file: &Checkpoint, scalar: impl Fn(&TensorInfo) -> Option<f64>) -> Result<Self> {
        let tensor = |info: &TensorInfo| AdapterTensor {
            key: info.name.clone(),
            dtype: info.kind.to_string(),
            shape: info.shape.clone(),
        };
        let ones = file.tensors().iter().filter(|info| info.shape.iter().all(|n| *n == 1));
        let scalars = ones.filter_map(|info| Some((info.name.clone(), scalar(info)?))).collect();
        let made = Self::new(file.tensors().iter().map(tensor))?;
        Ok(made.with_scalars(scalars).with_metadata(file.metadata().clone()))
    }

    /// With the values of tensors of one element, by key.
    #[must_use]
    pub fn with_scalars(self, scalars: HashMap<String, f64>) -> Self {
        Self { scalars, ..self }
    }

    /// With the metadata of the file's header.
    #[must_use]
    pub fn with_metadata(self, metadata: BTreeMap<String, String>) -> Self {
        Self { metadata, ..self }
    }

    /// With the text of the `adapter_config.json` beside the file.
    #[must_use]
    pub fn with_config(self, config: Option<String>) -> Self {
        Self { config, ..self }
    }

    /// All tensors, by key.
    pub fn tensors(&self) -> &[AdapterTensor] {
        &self.tensors
    }

    /// The value of a tensor of one element.
    pub fn scalar(&self, key: &str) -> Option<f64> {
        self.scalars.get(key).copied()
    }

    /// The header's metadata.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// The text of `adapter_config.json`.
    pub fn config(&self) -> Option<&str> {
        self.config.as_deref()
    }
}
