//! The formats that are known, and what their handlers share.

mod bnb;
mod compressed;
mod fp8;
mod ggml;
mod gptq;
mod int8;
mod mxfp8;
mod nunchaku;
mod nvfp4;
mod quanto;
mod torchao;
mod w4a8;

use checkpoint::TensorInfo;

pub(super) use torchao::class as torchao_class;

use super::handler::{Described, Handler};
use super::header::{Header, described, elements, inside, is, module};
use super::marker::TENSOR;
use crate::error::{QuantError, Result};
use crate::formats::{Number, Order, Scales};
use crate::weight::{Part, PartRole, QuantWeight};

/// All of them.
pub(super) fn builtin() -> Vec<Box<dyn Handler>> {
    vec![
        Box::new(nvfp4::NvFp4),
        Box::new(nunchaku::Nunchaku),
        Box::new(bnb::Bnb),
        Box::new(w4a8::W4A8Handler),
        Box::new(quanto::Quanto),
        Box::new(gptq::Gptq),
        Box::new(compressed::Compressed),
        Box::new(torchao::TorchAo),
        Box::new(mxfp8::MxFp8),
        Box::new(fp8::Fp8),
        Box::new(int8::Int8),
        Box::new(ggml::Ggml),
    ]
}

/// Rows and columns of the blocks that FP8 models are scaled in where nothing else fits or is said.
const BLOCK: u64 = 128;

/// The weights whose packed numbers have this name in their layer and this type, if it is given, with these tensors beside them.
fn packed_as(header: &Header<'_>, name: &str, kind: Option<&str>, beside: &[&str]) -> Vec<String> {
    let packed = header.tensors().filter_map(|tensor| {
        let owner = module(&tensor.name);
        let ours = tensor.name == inside(owner, name) && kind.is_none_or(|kind| is(tensor, kind));
        let whole = || beside.iter().all(|name| header.get(&inside(owner, name)).is_some());
        (ours && whole()).then(|| inside(owner, "weight"))
    });
    packed.collect()
}

/// The tensors that scale a weight, in every spelling.
pub(super) fn scales<'a>(header: &Header<'a>, weight: &str) -> Vec<&'a TensorInfo> {
    let mut names = vec![format!("{weight}_scale"), format!("{weight}_scale_inv")];
    if weight == "weight" || weight.ends_with(".weight") {
        names.push(inside(module(weight), "scale_weight"));
    }
    names.iter().filter_map(|name| header.get(name)).collect()
}

/// The one scale of a weight. Where a file has it in two spellings, both must be the same numbers.
fn one_scale<'a>(header: &Header<'a>, weight: &str) -> Result<Option<&'a TensorInfo>> {
    let all = scales(header, weight);
    let Some((&first, others)) = all.split_first() else { return Ok(None) };
    for other in others {
        let numbers = |tensor: &TensorInfo| -> Result<Option<Vec<u32>>> {
            let Some(number) = Number::of(tensor.kind) else { return Ok(None) };
            let bytes = header.marker(weight, tensor)?;
            let count = bytes.len() / number.bytes();
            Ok(Some((0..count).map(|at| number.at(&bytes, at).to_bits()).collect()))
        };
        let (one, two) = (numbers(first)?, numbers(other)?);
        if one.is_none() || one != two {
            let (first, second) = (first.name.clone(), other.name.clone());
            return Err(QuantError::ScalesDiffer { layer: weight.into(), first, second });
        }
    }
    Ok(Some(first))
}

/// What shares a scale, from the shapes of weight and scale.
fn laid_out(weight: &str, shape: &[u64], scale: &TensorInfo, group: Option<u64>) -> Result<Scales> {
    let refuse = |need: &str| QuantError::PartKind {
        layer: weight.into(),
        tensor: scale.name.clone(),
        have: described(scale),
        need: format!("{need}, for a weight of the shape {shape:?}"),
    };
    if !Number::of(scale.kind).is_some_and(Number::is_float) {
        return Err(refuse("F32, F16 or BF16"));
    }
    if elements(&scale.shape) == Some(1) {
        return Ok(Scales::Tensor);
    }
    let used = scale.shape.iter().rposition(|&length| length != 1).map_or(0, |last| last + 1);
    let [experts, rows, columns] = match (shape, &scale.shape[..used]) {
        ([rows, _, ..], [count]) if rows == count => return Ok(Scales::Row),
        (&[rows, columns], &[_] | &[_, _]) => [1, rows, columns],
        // Matrices below each other, each with scales of its own.
        (&[experts, rows, columns], &[count, _] | &[count, _, _]) if count == experts => {
            [experts, rows, columns]
        }
        _ => return Err(refuse("one number, one a row, or one a block of a matrix")),
    };
    let full = scale.shape.len() == shape.len();
    let own = if shape.len() == 3 { &scale.shape[1..] } else { &scale.shape[..] };
    let [below, beside] = [own[0], own.get(1).copied().unwrap_or(1)];
    let fits = |height: u64, width: u64| {
        let apart = experts == 1 || height > 0 && rows.is_multiple_of(height);
        apart
            && height > 0
            && width > 0
            && rows.div_ceil(height) == below
            && columns.div_ceil(width) == beside
    };
    let blocks = |rows, columns| Ok(Scales::Blocks { rows, columns, order: Order::Rows });
    if let Some(group) = group {
        return match () {
            () if fits(1, group) => blocks(1, group),
            () if fits(group, group) => blocks(group, group),
            () => Err(refuse("one for each group or each square block that the file names")),
        };
    }
    if full && fits(BLOCK, BLOCK) {
        return blocks(BLOCK, BLOCK);
    }
    if rows.div_ceil(BLOCK) == below && columns.div_ceil(BLOCK) == beside && experts > 1 && below > 1 {
        return Err(refuse("blocks that end where each matrix does"));
    }
    let whole =
        |all: u64, count: u64| (count > 0 && all > 0 && all.is_multiple_of(count)).then(|| all / count);
    match (whole(rows, below), whole(columns, beside)) {
        (Some(height), Some(width)) if full => blocks(height, width),
        _ => Err(refuse("one number, one a row, or one a block")),
    }
}

/// The parts of a layer that say something of it or of its inputs, and belong to no weight's numbers.
fn hints(header: &Header<'_>, weight: &str) -> Vec<String> {
    let names = [TENSOR, "input_scale", "scale_input", "output_scale", "scale_output"];
    let here = names.map(|name| inside(module(weight), name));
    here.into_iter().filter(|name| header.get(name).is_some()).collect()
}

/// A weight's tensor, which handlers only name after they have seen it.
fn tensor<'a>(header: &Header<'a>, layer: &str, name: &str) -> Result<&'a TensorInfo> {
    header.get(name).ok_or_else(|| QuantError::NotUnderstood {
        layer: layer.into(),
        tensor: name.into(),
        why: "the file does not have this tensor".into(),
    })
}

/// A tensor that must have a type and a number of elements.
fn checked<'a>(
    header: &Header<'a>,
    layer: &str,
    name: &str,
    kinds: &[&str],
    count: u64,
) -> Result<&'a TensorInfo> {
    let found = tensor(header, layer, name)?;
    if kinds.contains(&found.kind.to_string().as_str()) && elements(&found.shape) == Some(count) {
        return Ok(found);
    }
    Err(QuantError::PartKind {
        layer: layer.into(),
        tensor: name.into(),
        have: described(found),
        need: format!("{count} × {}", kinds.join(" or ")),
    })
}

/// A weight's two dimensions, which its format needs.
fn two(layer: &str, tensor: &TensorInfo, need: &str) -> Result<[u64; 2]> {
    <[u64; 2]>::try_from(tensor.shape.as_slice()).map_err(|_| QuantError::PartKind {
        layer: layer.into(),
        tensor: tensor.name.clone(),
        have: described(tensor),
        need: need.into(),
    })
}

/// A weight of parts, with the hints of its layer.
fn draft(
    header: &Header<'_>,
    name: &str,
    shape: &[u64],
    format: crate::weight::Format,
    parts: &[(PartRole, &TensorInfo)],
) -> Described {
    let parts = parts.iter().map(|(role, tensor)| Part::of(*role, tensor)).collect();
    let weight =
        QuantWeight { name: name.into(), shape: shape.into(), format, parts, transforms: Vec::new() };
    Described { hints: hints(header, name), ..Described::new(weight) }
}
