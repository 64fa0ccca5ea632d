//! Where the bytes of a weight's parts come from.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;

/// Gives the bytes of tensors by name. Decoders borrow them: from a mapped file, from memory that was read, from anywhere.
pub trait Parts: Sync {
    /// All bytes of the tensor with this name, as the file has them. None if it is not there.
    fn bytes(&self, tensor: &str) -> Option<&[u8]>;
}

impl<B: AsRef<[u8]> + Sync> Parts for BTreeMap<String, B> {
    fn bytes(&self, tensor: &str) -> Option<&[u8]> {
        self.get(tensor).map(AsRef::as_ref)
    }
}

impl<B: AsRef<[u8]> + Sync, S: BuildHasher + Sync> Parts for HashMap<String, B, S> {
    fn bytes(&self, tensor: &str) -> Option<&[u8]> {
        self.get(tensor).map(AsRef::as_ref)
    }
}

/// One tensor and its bytes: all there is of a ggml weight.
impl<B: AsRef<[u8]> + Sync> Parts for (&str, B) {
    fn bytes(&self, tensor: &str) -> Option<&[u8]> {
        (self.0 == tensor).then(|| self.1.as_ref())
    }
}
