//! What detection sees of a file: names, types, shapes and metadata, and a way to read the few tiny tensors that are text.

use std::collections::BTreeMap;
use std::fmt;
use std::io;

use checkpoint::safetensors::dtype_from_name;
use checkpoint::{Checkpoint, TensorInfo, TensorType};

use crate::error::{QuantError, Result};

/// The largest tensor that detection reads: descriptions in JSON, and scales that are there twice.
const MARKER: u64 = 1 << 20;

/// Reads all bytes of one small tensor.
pub type Read<'a> = dyn Fn(&TensorInfo) -> io::Result<Vec<u8>> + 'a;

/// The header of a model, whatever it came from.
pub struct Header<'a> {
    tensors: BTreeMap<&'a str, &'a TensorInfo>,
    metadata: &'a BTreeMap<String, String>,
    read: &'a Read<'a>,
}

impl<'a> Header<'a> {
    /// A header. `read` is only called for tensors of at most 1 MiB that describe others.
    pub fn new(
        tensors: impl IntoIterator<Item = &'a TensorInfo>,
        metadata: &'a BTreeMap<String, String>,
        read: &'a Read<'a>,
    ) -> Self {
        let tensors = tensors.into_iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
        Self { tensors, metadata, read }
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = &'a TensorInfo> + '_ {
        self.tensors.values().copied()
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&'a TensorInfo> {
        self.tensors.get(name).copied()
    }

    /// The tensors whose names begin so.
    pub fn beginning<'b>(&'b self, prefix: &'b str) -> impl Iterator<Item = &'a TensorInfo> + 'b {
        let from =
            self.tensors.range::<str, _>((std::ops::Bound::Included(prefix), std::ops::Bound::Unbounded));
        from.map(|(_, tensor)| *tensor).take_while(move |tensor| tensor.name.starts_with(prefix))
    }

    /// The free text of the files, by key.
    pub fn metadata(&self) -> &'a BTreeMap<String, String> {
        self.metadata
    }

    /// The bytes of a tensor that describes a layer.
    pub fn marker(&self, layer: &str, tensor: &TensorInfo) -> Result<Vec<u8>> {
        let refuse =
            |why: String| QuantError::Marker { layer: layer.into(), tensor: tensor.name.clone(), why };
        if tensor.bytes() > MARKER {
            return Err(refuse(format!("it has {} bytes, more than {MARKER}", tensor.bytes())));
        }
        (self.read)(tensor).map_err(|error| refuse(error.to_string()))
    }
}

impl fmt::Debug for Header<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Header").field("tensors", &self.tensors.len()).finish_non_exhaustive()
    }
}

/// Reads a tensor of an open checkpoint.
pub(super) fn read(model: &Checkpoint, tensor: &TensorInfo) -> io::Result<Vec<u8>> {
    let file = model.file_of(tensor).ok_or(io::ErrorKind::NotFound)?;
    let mut bytes = vec![0; tensor.bytes() as usize];
    file.read_exact_at_for(&tensor.name, tensor.range.start, &mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

/// The module that owns a weight: its name without the last part. Empty for a weight at the root.
pub(super) fn module(weight: &str) -> &str {
    weight.rsplit_once('.').map_or("", |(module, _)| module)
}

/// A name inside a module.
pub(super) fn inside(module: &str, name: &str) -> String {
    if module.is_empty() { name.to_owned() } else { format!("{module}.{name}") }
}

/// Whether a tensor's elements are of the type that safetensors spells so.
pub(super) fn is(tensor: &TensorInfo, kind: &str) -> bool {
    matches!(tensor.kind, TensorType::Plain(dtype) if dtype_from_name(kind) == Some(dtype))
}

/// Whether a tensor is FP8 that holds numbers, not scales.
pub(super) fn is_fp8(tensor: &TensorInfo) -> bool {
    is(tensor, "F8_E4M3") || is(tensor, "F8_E5M2")
}

/// The number of elements of a shape; none if that is beyond 64 bits.
pub(super) fn elements(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1_u64, |product, &next| product.checked_mul(next))
}

/// A tensor's type and shape in words.
pub(super) fn described(tensor: &TensorInfo) -> String {
    format!("{} {:?}", tensor.kind, tensor.shape)
}
