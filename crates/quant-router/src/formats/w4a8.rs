//! W4A8: numbers of 4 bits that stand for INT8 numbers, which stand for the weight's.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::numbers::{Number, pairs, part_numbers, runs};
use crate::dequantize::{Decode, part_bytes};
use crate::error::Result;
use crate::parts::Parts;
use crate::weight::{PartRole, QuantWeight};

/// Two numbers a byte, the first in the lower half. In INT8 each is its level × the group's scale ([`PartRole::GroupScale`]), rounded to
/// the nearest of -127 … 127, ties to even; the weight's number is that × the row's scale ([`PartRole::Scale`]), plus the
/// group's [`PartRole::Correction`] if there is one, which is kept by columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub struct W4A8 {
    /// Columns of a group.
    pub group: u64,
    /// Whether levels are those of [`PartRole::Codebook`]; otherwise -8 … 7.
    pub codebook: bool,
    /// Whether there are corrections.
    pub correction: bool,
}

impl fmt::Display for W4A8 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "W4A8 with a scale for {}", self.group)
    }
}

/// The decoder of such a weight, all sizes checked.
pub(crate) fn decoder<'a>(
    weight: &QuantWeight,
    format: W4A8,
    parts: &'a dyn Parts,
) -> Result<Box<dyn Decode + 'a>> {
    let elements = weight.elements()?;
    let (rows, columns) = (weight.rows()?, weight.columns());
    let group = format.group.max(1);
    if !columns.is_multiple_of(group) || !columns.is_multiple_of(2) {
        return Err(weight.bad_shape("its rows are no whole groups and bytes"));
    }
    let data = part_bytes(weight, weight.needs(PartRole::Data)?, parts, elements / 2)?;
    let groups = rows.saturating_mul(columns / group);
    let mut levels: [f32; 16] = std::array::from_fn(|code| code as f32 - 8.0);
    if format.codebook {
        let (bytes, number) = part_numbers(weight, PartRole::Codebook, parts, 16)?;
        levels = std::array::from_fn(|code| number.at(bytes, code));
    }
    let correction = if format.correction {
        Some(part_numbers(weight, PartRole::Correction, parts, groups)?)
    } else {
        None
    };
    Ok(Box::new(Decoder {
        data,
        levels,
        groups: part_numbers(weight, PartRole::GroupScale, parts, groups)?,
        scales: part_numbers(weight, PartRole::Scale, parts, rows)?,
        correction,
        rows: rows as usize,
        columns: (columns as usize).max(1),
        group: group as usize,
    }))
}

#[derive(Debug)]
struct Decoder<'a> {
    data: &'a [u8],
    levels: [f32; 16],
    groups: (&'a [u8], Number),
    scales: (&'a [u8], Number),
    correction: Option<(&'a [u8], Number)>,
    rows: usize,
    columns: usize,
    group: usize,
}

impl Decode for Decoder<'_> {
    fn granule(&self) -> usize {
        1
    }

    fn decode(&self, first: usize, out: &mut [f32]) {
        // Rows are whole groups.
        runs(first, out, self.group, |at, out| {
            let (row, group) = (at / self.columns, at % self.columns / self.group);
            let factor = self.groups.1.at(self.groups.0, row * (self.columns / self.group) + group);
            let scale = self.scales.1.at(self.scales.0, row);
            let add = self.correction.map(|(bytes, number)| number.at(bytes, group * self.rows + row));
            let level = |level: f32| {
                let number = (level * factor).round_ties_even().clamp(-127.0, 127.0) * scale;
                add.map_or(number, |add| number + add)
            };
            pairs(self.data, at, out, 0, &self.levels.map(level));
        });
    }
}
