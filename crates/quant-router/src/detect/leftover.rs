//! What no handler took: plain tensors, markers that say nothing, and signs of a format that is not understood.

use std::collections::BTreeSet;

use super::Detection;
use super::handler::Evidence;
use super::handlers::torchao_class;
use super::header::{described, inside, module};
use super::marker::TENSOR;
use crate::error::{QuantError, Result};

/// Names that only quantized layers have, beside or inside the module.
const SIGNS: &[&str] = &[
    "scale_weight",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_packed",
    "weight_shape",
    "weight_g_idx",
    "weight_zero_point",
    "weight_s_rel",
    "weight_s_channel",
    "qweight",
    "qzeros",
    "g_idx",
    "scales",
    "wscales",
    "wzeros",
    "wcscales",
    "SCB",
    "absmax",
    "quant_map",
    "nested_absmax",
    "nested_quant_map",
    "_data",
    "_scale",
    "_shift",
];
/// What begins the rest of a name, behind the weight, in files of bitsandbytes.
const STATE: &str = ".quant_state.";

/// Sorts what is not owned into plain tensors and hints. An error if one of them is a sign of quantization.
pub(super) fn sort(
    evidence: &Evidence<'_>,
    owned: &BTreeSet<String>,
    detection: &mut Detection,
) -> Result<()> {
    let header = evidence.header();
    for tensor in header.tensors().filter(|tensor| !owned.contains(&tensor.name)) {
        let name = tensor.name.as_str();
        let last = name.rsplit('.').next().unwrap_or(name);
        let weight = inside(module(name), "weight");
        if last == TENSOR || last == "scaled_fp8" {
            // Both are read below, with the weights that they speak of.
            if last == TENSOR && header.get(&weight).is_none() {
                contradicted(evidence, &weight, "not there")?;
            }
            detection.hints.insert(name.into());
            continue;
        }
        let inner = last.starts_with('_') || last == "absmax" || last.ends_with("quant_map");
        // `scales` is a name that plain modules use too; beside packed weights it is none.
        let packed = last != "scales" || header.get(&inside(module(name), "qweight")).is_some();
        // Inside a weight these names are signs; elsewhere a module may be called so.
        let sign = SIGNS.contains(&last) && packed && (!inner || in_weight(name))
            || name.contains(STATE)
            || last.starts_with('_') && last.ends_with("_qdata");
        if sign {
            return Err(QuantError::NotUnderstood {
                layer: match name.split_once(STATE) {
                    Some((layer, _)) => layer.into(),
                    None if inner => module(name).into(),
                    None => weight,
                },
                tensor: name.into(),
                why: format!("it is {}, and no known format has it so", described(tensor)),
            });
        }
        contradicted(evidence, name, &described(tensor))?;
        detection.plain.insert(name.into());
    }
    Ok(())
}

/// Whether a name lies inside a weight's own.
fn in_weight(name: &str) -> bool {
    let inside = module(name);
    inside == "weight" || inside.ends_with(".weight") || inside.ends_with("._data")
}

/// An error if the file says that a weight which no handler took is quantized.
fn contradicted(evidence: &Evidence<'_>, weight: &str, found: &str) -> Result<()> {
    if weight != "weight" && !weight.ends_with(".weight") {
        return Ok(());
    }
    let marker = evidence.marker(weight)?.and_then(|marker| marker.format);
    let map = || evidence.quanto(weight).map(str::to_owned);
    match marker.or_else(map).or_else(|| torchao_class(evidence.header(), weight)) {
        Some(says) => Err(QuantError::Contradiction { layer: weight.into(), says, found: found.into() }),
        None => Ok(()),
    }
}
