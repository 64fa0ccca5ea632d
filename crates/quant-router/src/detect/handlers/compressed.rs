//! Integers of compressed-tensors, packed in words: `weight_packed` beside `weight_scale`, and a tensor that holds the weight's shape.

use checkpoint::TensorInfo;

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{Header, described, inside, is, module};
use super::{draft, packed_as, tensor, two};
use crate::error::{QuantError, Result};
use crate::formats::{Number, PackedInt, Words, words_of};
use crate::weight::{Format, PartRole};

/// What it calls packed numbers, and what says their shape.
const PACKED: &str = "weight_packed";
const SHAPE: &str = "weight_shape";

#[derive(Debug)]
pub(super) struct Compressed;

impl Handler for Compressed {
    fn name(&self) -> &'static str {
        "compressed-tensors"
    }

    fn priority(&self) -> u32 {
        6
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        packed_as(evidence.header(), PACKED, Some("I32"), &["weight_scale"])
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let named = |name: &str| inside(module(weight), name);
        let data = tensor(header, weight, &named(PACKED))?;
        let [rows, columns] = shape(header, weight, &named(SHAPE))?;
        let refuse = |about: &TensorInfo, need: String| QuantError::PartKind {
            layer: weight.into(),
            tensor: about.name.clone(),
            have: described(about),
            need: format!("{need}, for a weight of the shape {:?}", [rows, columns]),
        };
        let [height, width] = two(weight, data, "a matrix of words")?;
        let fits = |bits: &u32| height == rows && words_of(columns, *bits) == Some(width);
        let mut bits = [2_u32, 3, 4, 8].into_iter().filter(fits);
        let (Some(bits), None) = (bits.next(), bits.next()) else {
            return Err(refuse(data, "words of numbers of either 2, 3, 4 or 8 bits".into()));
        };
        let scale = tensor(header, weight, &named("weight_scale"))?;
        let [scaled, groups] = two(weight, scale, "a matrix, a row a row")?;
        let group = columns.div_ceil(groups.max(1));
        let whole = groups > 0 && columns > 0 && columns.div_ceil(group) == groups;
        if !Number::of(scale.kind).is_some_and(Number::is_float) || scaled != rows || !whole {
            return Err(refuse(scale, "floats, one for each group of each row".into()));
        }
        let mut parts = vec![(PartRole::Data, data), (PartRole::Scale, scale)];
        let zero = header.get(&named("weight_zero_point"));
        if let Some(zero) = zero {
            let words = words_of(rows, bits).unwrap_or(u64::MAX);
            if !is(zero, "I32") || zero.shape != [words, groups] {
                return Err(refuse(zero, format!("I32 {:?}", [words, groups])));
            }
            parts.push((PartRole::ZeroPoint, zero));
        }
        let index = header.get(&named("weight_g_idx"));
        if let Some(index) = index {
            if !is(index, "I32") || index.shape != [columns] {
                return Err(refuse(index, format!("I32 {:?}", [columns])));
            }
            parts.push((PartRole::GroupIndex, index));
        }
        let (indexed, symmetric) = (index.is_some(), zero.is_none());
        let words = Words::Along;
        let format = PackedInt { bits, words, group, indexed, zero_less_one: false, symmetric };
        let mut described = draft(header, weight, &[rows, columns], Format::PackedInt(format), &parts);
        described.hints.push(named(SHAPE));
        let given = named("input_global_scale");
        if header.get(&given).is_some() {
            described.hints.push(given);
        }
        Ok(described)
    }
}

/// The shape that a tensor holds.
fn shape(header: &Header<'_>, weight: &str, name: &str) -> Result<[u64; 2]> {
    let found = tensor(header, weight, name)?;
    let refuse = |why: &str| QuantError::Marker {
        layer: weight.into(),
        tensor: name.into(),
        why: format!("it is {}, and {why}", described(found)),
    };
    if found.shape != [2] || !(is(found, "I64") || is(found, "I32")) {
        return Err(refuse("two integers are needed, rows and columns"));
    }
    let bytes = header.marker(weight, found)?;
    let size = if is(found, "I64") { 8 } else { 4 };
    let number = |at: usize| -> Option<u64> {
        let bytes = bytes.get(at * size..(at + 1) * size)?;
        match size {
            8 => i64::from_le_bytes(bytes.try_into().ok()?).try_into().ok(),
            _ => i32::from_le_bytes(bytes.try_into().ok()?).try_into().ok(),
        }
    };
    match (number(0), number(1)) {
        (Some(rows), Some(columns)) => Ok([rows, columns]),
        _ => Err(refuse("its numbers are none that a shape has")),
    }
}
