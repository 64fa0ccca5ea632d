//! Tells a model's own weights from an adapter's: who gives a whole checkpoint as an adapter is told so in one sentence.

use crate::file::AdapterFile;
use crate::key::{Role, parse_key};
use crate::layers::Layers;
use crate::names::strip;

/// Words of adapters that are not read: a file with one of them is none of whole weights.
const ADAPTERS: &[&str] = &["lora", "lokr", "hada_", "oft", "vera", "ia3", "adapter", "tuning", "prompt"];

/// A sentence about a file that holds no part of an adapter, but weights and biases.
pub(super) fn sentence(layers: &Layers, file: &AdapterFile) -> Option<String> {
    let (mut plain, mut named) = (0_usize, 0_usize);
    for tensor in file.tensors() {
        match parse_key(&tensor.key) {
            // Some models have parameters of that name.
            Ok(key) if key.role == Role::Alpha => continue,
            Ok(_) => return None,
            Err(_) if ADAPTERS.iter().any(|word| tensor.key.contains(word)) => return None,
            Err(_) => {}
        }
        let layer = tensor.key.strip_suffix(".weight").or_else(|| tensor.key.strip_suffix(".bias"));
        plain += usize::from(layer.is_some());
        let names = |name: &str| strip(name).iter().any(|stripped| layers.exact(stripped.rest).is_some());
        named += usize::from(names(layer.unwrap_or(&tensor.key)));
    }
    let all = file.tensors().len();
    // Half of them are enough: the others are scales of quantized weights, and bare parameters.
    if all == 0 || plain * 2 < all && named * 2 < all {
        return None;
    }
    let whose = match named {
        0 => "none of them is of this model".to_owned(),
        _ => format!("{named} of them are of this model"),
    };
    Some(format!(
        "it is a full checkpoint and no adapter: {all} tensors, which are a model's own weights, and {whose}; load it as a model, \
         for instance with load_model_data"
    ))
}
