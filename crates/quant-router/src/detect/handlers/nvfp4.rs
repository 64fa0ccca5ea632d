//! NVFP4: blocks of 16 numbers of 4 bits with FP8 scales and a second scale, in the two layouts that image and video models have, and in
//! those of compressed-tensors and of `ModelOpt`, whose scales lie in rows.

use checkpoint::TensorInfo;

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, inside, is, module};
use super::{checked, draft, tensor, two};
use crate::error::{QuantError, Result};
use crate::formats::grid::swizzled;
use crate::formats::{Codes, Family, Global, Order, Scaled, Scales};
use crate::weight::{Format, Part, PartRole, Transform};

/// Columns that share a scale.
const BLOCK: u64 = 16;
/// The types that a second scale comes in.
const SECOND: [&str; 3] = ["F32", "F16", "BF16"];

/// What compressed-tensors calls packed numbers.
const PACKED: &str = "weight_packed";

#[derive(Debug)]
pub(super) struct NvFp4;

impl Handler for NvFp4 {
    fn name(&self) -> &'static str {
        "nvfp4"
    }

    fn priority(&self) -> u32 {
        1
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let header = evidence.header();
        let packed = header.tensors().filter(|tensor| is(tensor, "U8"));
        let scaled = packed.filter(|tensor| {
            header.get(&format!("{}_scale", tensor.name)).is_some_and(|scale| is(scale, "F8_E4M3"))
        });
        let packed = header.tensors().filter(|tensor| is(tensor, "U8")).filter_map(|tensor| {
            let owner = module(&tensor.name);
            let scale = header.get(&inside(owner, "weight_scale")).filter(|scale| is(scale, "F8_E4M3"));
            let ours = tensor.name == inside(owner, PACKED) && scale.is_some();
            ours.then(|| inside(owner, "weight"))
        });
        scaled.map(|tensor| tensor.name.clone()).chain(packed).collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        if header.get(&inside(module(weight), PACKED)).is_some() {
            return compressed(evidence, weight);
        }
        let data = tensor(header, weight, weight)?;
        evidence.marker_of(weight, &["nvfp4"], &format!("NVFP4 ({})", described(data)))?;
        let [rows, bytes] = two(weight, data, "a matrix, as NVFP4")?;
        let columns = bytes.saturating_mul(2);
        let scale = tensor(header, weight, &format!("{weight}_scale"))?;
        let blocks = [rows, columns.div_ceil(BLOCK)];
        if scale.shape == blocks && evidence.config(weight)?.get("quant_method") == Some("modelopt") {
            return in_rows(evidence, weight, data, [rows, columns]);
        }
        if !columns.is_multiple_of(BLOCK) || scale.shape != swizzled(blocks) {
            return Err(QuantError::PartKind {
                layer: weight.into(),
                tensor: scale.name.clone(),
                have: described(scale),
                need: format!(
                    "F8_E4M3 {:?}, whole tiles of NVFP4 scales (scales in rows are understood where metadata \
                     `quantization_config` names ModelOpt)",
                    swizzled(blocks)
                ),
            });
        }
        let named = |name: &str| inside(module(weight), name);
        let there = |name: &str| header.get(&named(name)).is_some();
        let second = format!("{weight}_scale_2");
        let one = |name: &str| checked(header, weight, name, &SECOND, 1);
        let (codes, global, factors) = if header.get(&second).is_some() {
            (Codes::E2m1High, Global::Factor, vec![(PartRole::GlobalScale, one(&second)?)])
        } else if there("alpha") && there("input_global_scale") {
            let factors = vec![
                (PartRole::GlobalScale, one(&named("alpha"))?),
                (PartRole::InputScale, one(&named("input_global_scale"))?),
            ];
            (Codes::E2m1Low, Global::TimesInput, factors)
        } else if there("input_absmax") && there("weight_global_scale") {
            let factors = vec![
                (PartRole::GlobalScale, one(&named("weight_global_scale"))?),
                (PartRole::InputScale, one(&named("input_absmax"))?),
            ];
            (Codes::E2m1Low, Global::InverseOfInput, factors)
        } else {
            return Err(QuantError::NoScale {
                layer: weight.into(),
                kind: format!("NVFP4 ({})", described(data)),
                evidence: format!("a second scale is needed beside {:?}", scale.name),
            });
        };
        let order = Order::Swizzled;
        let scales = Scales::Blocks { rows: 1, columns: BLOCK, order };
        let format =
            Format::Scaled(Scaled { family: Family::NvFp4, codes, scales, global, zero_point: false });
        let mut parts = vec![(PartRole::Data, data), (PartRole::Scale, scale)];
        parts.extend(factors);
        let mut described = draft(header, weight, &[rows, columns], format, &parts);
        let factor = named("pre_quant_scale");
        if there("pre_quant_scale") {
            let factor = checked(header, weight, &factor, &SECOND, columns)?;
            described.weight.parts.push(Part::of(PartRole::InputFactor, factor));
            described.weight.transforms.push(Transform::Multiply);
        }
        // What the chosen layout does not read belongs to the layer all the same.
        for name in ["input_global_scale", "alpha", "input_absmax", "weight_global_scale"].map(named) {
            if header.get(&name).is_some() && !described.weight.parts.iter().any(|part| part.tensor == name) {
                described.hints.push(name);
            }
        }
        Ok(described)
    }
}

/// The layout of `ModelOpt`: the first number in the lower half of a byte, scales in rows, times `weight_scale_2`.
fn in_rows(evidence: &Evidence<'_>, weight: &str, data: &TensorInfo, shape: [u64; 2]) -> Result<Described> {
    let header = evidence.header();
    let scale = tensor(header, weight, &format!("{weight}_scale"))?;
    let second = checked(header, weight, &format!("{weight}_scale_2"), &SECOND, 1)?;
    let parts = [(PartRole::Data, data), (PartRole::Scale, scale), (PartRole::GlobalScale, second)];
    let mut described = draft(header, weight, &shape, row_format(Global::Factor), &parts);
    let factor = inside(module(weight), "pre_quant_scale");
    if header.get(&factor).is_some() {
        let factor = checked(header, weight, &factor, &SECOND, shape[1])?;
        described.weight.parts.push(Part::of(PartRole::InputFactor, factor));
        described.weight.transforms.push(Transform::Multiply);
    }
    Ok(described)
}

/// The layout of compressed-tensors: as `ModelOpt`'s, with scales that are divided by `weight_global_scale`.
fn compressed(evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
    let header = evidence.header();
    let named = |name: &str| inside(module(weight), name);
    let data = tensor(header, weight, &named(PACKED))?;
    evidence.marker_of(weight, &["nvfp4"], &format!("NVFP4 ({})", described(data)))?;
    let [rows, bytes] = two(weight, data, "a matrix, as NVFP4")?;
    let columns = bytes.saturating_mul(2);
    let scale = tensor(header, weight, &named("weight_scale"))?;
    if !columns.is_multiple_of(BLOCK) || scale.shape != [rows, columns / BLOCK] {
        return Err(QuantError::PartKind {
            layer: weight.into(),
            tensor: scale.name.clone(),
            have: described(scale),
            need: format!("F8_E4M3 {:?}, a scale for {BLOCK} columns", [rows, columns / BLOCK]),
        });
    }
    let second = checked(header, weight, &named("weight_global_scale"), &SECOND, 1)?;
    let parts = [(PartRole::Data, data), (PartRole::Scale, scale), (PartRole::GlobalScale, second)];
    let mut described = draft(header, weight, &[rows, columns], row_format(Global::Divisor), &parts);
    for hint in ["input_global_scale", "weight_shape"].map(named) {
        if header.get(&hint).is_some() {
            described.hints.push(hint);
        }
    }
    Ok(described)
}

fn row_format(global: Global) -> Format {
    let scales = Scales::Blocks { rows: 1, columns: BLOCK, order: Order::Rows };
    let codes = Codes::E2m1Low;
    Format::Scaled(Scaled { family: Family::NvFp4, codes, scales, global, zero_point: false })
}
