//! INT8 weights with a scale, rotated (`ConvRot`) or not.

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, inside, is, module};
use super::super::marker::TENSOR;
use super::{draft, laid_out, one_scale, scales, tensor};
use crate::error::{QuantError, Result};
use crate::formats::{Codes, Family, Global, Number, Scaled, is_rotatable};
use crate::weight::{Format, PartRole, Transform};

#[derive(Debug)]
pub(super) struct Int8;

impl Handler for Int8 {
    fn name(&self) -> &'static str {
        "int8"
    }

    fn priority(&self) -> u32 {
        11
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let header = evidence.header();
        let int8 = header.tensors().filter(|tensor| is(tensor, "I8"));
        let scaled = int8.filter(|tensor| !scales(header, &tensor.name).is_empty());
        scaled.map(|tensor| tensor.name.clone()).collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let data = tensor(header, weight, weight)?;
        let marker = evidence.marker_of(weight, &["int8_tensorwise", "int8_blockwise"], &described(data))?;
        let refuse = |why: String| QuantError::NotUnderstood {
            layer: weight.into(),
            tensor: marker.as_ref().map_or_else(|| weight.into(), |marker| marker.source.clone()),
            why,
        };
        let Some(scale) = one_scale(header, weight)? else {
            return Err(refuse("INT8 without a scale".into()));
        };
        let group = marker.as_ref().and_then(|marker| marker.group);
        let (family, codes) = (Family::Int8, Codes::Int8);
        let scales = laid_out(weight, &data.shape, scale, group)?;
        let format =
            Format::Scaled(Scaled { family, codes, scales, global: Global::None, zero_point: false });
        let parts = [(PartRole::Data, data), (PartRole::Scale, scale)];
        let mut described = draft(header, weight, &data.shape, format, &parts);
        let others = super::scales(header, weight).into_iter().skip(1).map(|other| other.name.clone());
        described.hints.extend(others);
        if let Some(group) = marker.as_ref().and_then(|marker| marker.rotation) {
            let [_, columns] = super::two(weight, data, "a matrix, since it is rotated")?;
            if !is_rotatable(group) {
                return Err(refuse(format!("it is rotated in groups of {group}, which is no power of four")));
            }
            if !columns.is_multiple_of(group) {
                return Err(refuse(format!(
                    "it is rotated in groups of {group}, and its {columns} columns are no multiple of that"
                )));
            }
            described.weight.transforms.push(Transform::Hadamard { group });
        }
        // A marker that was wiped out may have said that the layer is rotated, as its neighbours do.
        if let (None, true, Some(rotated)) =
            (&marker, header.get(&inside(module(weight), TENSOR)).is_some(), evidence.rotated())
        {
            return Err(refuse(format!("its {TENSOR} is empty, and {rotated:?} is rotated")));
        }
        if Number::of(scale.kind) != Some(Number::F32) {
            described.notes.push(format!("{:?} is {}, widened to F32", scale.name, scale.kind));
        }
        Ok(described)
    }
}
