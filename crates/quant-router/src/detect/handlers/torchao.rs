//! torchao, as its own functions write safetensors files: the parts of `a.weight` are `a._weight_qdata`, `a._weight_scale` and so
//! on, and metadata under the weight's name says which tensor they make.

use checkpoint::TensorInfo;
use serde::Deserialize;
use serde_json::Value;

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{Header, described, inside, is, is_fp8, module};
use super::{checked, draft, laid_out, tensor};
use crate::error::{QuantError, Result};
use crate::formats::{Codes, Family, Global, Number, Order, Scaled, Scales};
use crate::weight::{Format, Part, PartRole, Transform};

/// The types that scales come in.
const FLOATS: [&str; 3] = ["F32", "F16", "BF16"];
/// Tensors that are number × scale. torchao has others, which are packed for one kind of device.
const KNOWN: [&str; 3] = ["Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor"];
/// Parts that speak of inputs only.
const INPUTS: [&str; 2] = ["act_quant_scale", "act_quant_zero_point"];

/// What the metadata says of a weight.
#[derive(Debug, Deserialize)]
struct Said {
    #[serde(rename = "_type")]
    class: String,
    #[serde(default, rename = "_data")]
    data: Value,
    #[serde(default, rename = "_tensor_data_names")]
    parts: Vec<String>,
}

#[derive(Debug)]
pub(super) struct TorchAo;

/// The class of tensor that metadata names for a weight. None if it names none, or a plain one.
pub(in crate::detect) fn class(header: &Header<'_>, weight: &str) -> Option<String> {
    let said: Said = serde_json::from_str(header.metadata().get(weight)?).ok()?;
    (said.class != "Tensor").then_some(said.class)
}

/// The name of a weight's part.
fn named(weight: &str, part: &str) -> String {
    let last = weight.rsplit('.').next().unwrap_or(weight);
    inside(module(weight), &format!("_{last}_{part}"))
}

impl Handler for TorchAo {
    fn name(&self) -> &'static str {
        "torchao"
    }

    fn priority(&self) -> u32 {
        6
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let names = evidence.header().tensors().filter_map(|tensor| {
            let weight = tensor.name.strip_suffix("_qdata")?;
            let last = weight.rsplit('.').next()?.strip_prefix('_')?;
            Some(inside(module(weight), last))
        });
        names.collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let data = tensor(header, weight, &named(weight, "qdata"))?;
        let refuse =
            |why: String| QuantError::NotUnderstood { layer: weight.into(), tensor: data.name.clone(), why };
        let Some(text) = header.metadata().get(weight) else {
            return Err(refuse("no metadata says which tensor of torchao it is".into()));
        };
        let said: Said = serde_json::from_str(text).map_err(|error| QuantError::Marker {
            layer: weight.into(),
            tensor: weight.into(),
            why: error.to_string(),
        })?;
        if !KNOWN.contains(&said.class.as_str()) {
            return Err(refuse(format!("the tensor {} of torchao is not known here", said.class)));
        }
        let codes = match () {
            () if said.class == "Float8Tensor" && is(data, "F8_E5M2") => Codes::E5m2,
            () if said.class == "Float8Tensor" && is_fp8(data) => Codes::E4m3,
            () if said.class != "Float8Tensor" && is(data, "I8") => Codes::Int8,
            () => {
                let (layer, says, found) = (weight.into(), said.class, described(data));
                return Err(QuantError::Contradiction { layer, says, found });
            }
        };
        let scale = tensor(header, weight, &named(weight, "scale"))?;
        let scales = scales(weight, data, scale, said.data.get("block_size"))?;
        let mut parts = vec![(PartRole::Data, data), (PartRole::Scale, scale)];
        let has = |part: &str| said.parts.iter().any(|name| name == part);
        if has("zero_point") {
            let count = scale.shape.iter().product();
            let zero_point = checked(header, weight, &named(weight, "zero_point"), &["I8"], count)?;
            parts.push((PartRole::ZeroPoint, zero_point));
        }
        let (family, global, zero_point) = (Family::TorchAo, Global::None, has("zero_point"));
        let format = Format::Scaled(Scaled { family, codes, scales, global, zero_point });
        let mut found = draft(header, weight, &data.shape, format, &parts);
        for part in &said.parts {
            let name = named(weight, part);
            match part.as_str() {
                "qdata" | "scale" | "zero_point" => {}
                "act_pre_scale" => {
                    let columns = data.shape.last().copied().unwrap_or(1);
                    let factor = checked(header, weight, &name, &FLOATS, columns)?;
                    found.weight.parts.push(Part::of(PartRole::InputFactor, factor));
                    found.weight.transforms.push(Transform::Multiply);
                }
                part if INPUTS.contains(&part) => {
                    found.hints.push(tensor(header, weight, &name)?.name.clone());
                }
                part => return Err(refuse(format!("its part {part:?} is not known here"))),
            }
        }
        Ok(found)
    }
}

/// What shares a scale, by the block that the metadata names, or by shapes where it names none.
fn scales(weight: &str, data: &TensorInfo, scale: &TensorInfo, block: Option<&Value>) -> Result<Scales> {
    let block: Option<Vec<u64>> = match block {
        None | Some(Value::Null) => None,
        Some(Value::Array(lengths)) => lengths.iter().map(Value::as_u64).collect(),
        Some(_) => Some(Vec::new()),
    };
    let Some(block) = block else { return laid_out(weight, &data.shape, scale, None) };
    let refuse = || QuantError::PartKind {
        layer: weight.into(),
        tensor: scale.name.clone(),
        have: described(scale),
        need: format!("one for each block of {block:?}, for a weight of the shape {:?}", data.shape),
    };
    let (&[rows, columns], &[height, width]) = (&data.shape[..], &block[..]) else { return Err(refuse()) };
    let whole = |all: u64, one: u64| one > 0 && all.is_multiple_of(one);
    let float = Number::of(scale.kind).is_some_and(Number::is_float);
    if !float || !whole(rows, height) || !whole(columns, width) {
        return Err(refuse());
    }
    let count = (rows / height).checked_mul(columns / width);
    if count.is_none() || scale.shape.iter().try_fold(1_u64, |all, &next| all.checked_mul(next)) != count {
        return Err(refuse());
    }
    Ok(match () {
        () if count == Some(1) => Scales::Tensor,
        () if height == 1 && width == columns => Scales::Row,
        () => Scales::Blocks { rows: height, columns: width, order: Order::Rows },
    })
}
