//! W4A8: packed numbers of 4 bits with scales by group and by row, for rotated inputs.

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, elements, is};
use super::{checked, draft, tensor, two};
use crate::error::{QuantError, Result};
use crate::formats::{W4A8, is_rotatable};
use crate::weight::{Format, PartRole, Transform};

/// What files call it.
const NAMES: [&str; 2] = ["asym_w4a8_int8", "w4a8_int8"];
/// The types that its scales come in.
const NUMBERS: [&str; 4] = ["F32", "F16", "BF16", "F8_E4M3"];
/// Columns of the groups that inputs are rotated in where a file that names the format names no size: what its writers take.
const ROTATION: u64 = 256;

#[derive(Debug)]
pub(super) struct W4A8Handler;

impl Handler for W4A8Handler {
    fn name(&self) -> &'static str {
        "w4a8"
    }

    fn priority(&self) -> u32 {
        4
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let header = evidence.header();
        let packed = header
            .tensors()
            .filter(|tensor| is(tensor, "I8") && header.get(&format!("{}_s_rel", tensor.name)).is_some());
        packed.map(|tensor| tensor.name.clone()).collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let data = tensor(header, weight, weight)?;
        let marker = evidence.marker_of(weight, &NAMES, &format!("W4A8 ({})", described(data)))?;
        let refuse = |why: String| QuantError::NotUnderstood {
            layer: weight.into(),
            tensor: format!("{weight}_s_rel"),
            why,
        };
        let Some(marker) = marker.filter(|marker| marker.format.is_some()) else {
            return Err(refuse("nothing says in which groups the inputs of this W4A8 are rotated".into()));
        };
        let [rows, bytes] = two(weight, data, "a matrix, as W4A8")?;
        let columns = bytes.saturating_mul(2);
        let relative = tensor(header, weight, &format!("{weight}_s_rel"))?;
        let [_, groups] = two(weight, relative, "a scale for each group of each row")?;
        let group = if groups > 0 && columns.is_multiple_of(groups) { columns / groups } else { 0 };
        if group == 0 || marker.group.is_some_and(|said| said != group) {
            let said = marker.group.map_or_else(String::new, |said| format!(" of {said}"));
            return Err(refuse(format!("{columns} columns are no {groups} groups{said}")));
        }
        let rotation = marker.rotation_group.unwrap_or(ROTATION);
        if !is_rotatable(rotation) || !columns.is_multiple_of(rotation) {
            return Err(refuse(format!("{columns} columns cannot be rotated in groups of {rotation}")));
        }
        let count = elements(&[rows, groups]).unwrap_or(0);
        let named = |ending: &str| format!("{weight}_{ending}");
        let mut parts = vec![
            (PartRole::Data, data),
            (PartRole::GroupScale, checked(header, weight, &named("s_rel"), &NUMBERS, count)?),
            (PartRole::Scale, checked(header, weight, &named("s_channel"), &NUMBERS[..3], rows)?),
        ];
        let (codebook, correction) = (named("codebook"), named("correction"));
        let there = |name: &str| header.get(name).is_some();
        let format = W4A8 { group, codebook: there(&codebook), correction: there(&correction) };
        if format.codebook {
            parts.push((PartRole::Codebook, checked(header, weight, &codebook, &NUMBERS[..3], 16)?));
        }
        if format.correction {
            let found = checked(header, weight, &correction, &NUMBERS[..3], count)?;
            if found.shape != [groups, rows] {
                return Err(refuse(format!("its corrections are {}", described(found))));
            }
            parts.push((PartRole::Correction, found));
        }
        let mut described = draft(header, weight, &[rows, columns], Format::W4A8(format), &parts);
        described.weight.transforms.push(Transform::Hadamard { group: rotation });
        Ok(described)
    }
}
