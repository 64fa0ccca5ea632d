//! The formats of optimum-quanto below a byte: unsigned numbers of 4 or 2 bits in groups, each with a scale and a shift.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::numbers::{Number, part_numbers, runs};
use crate::dequantize::{Decode, part_bytes};
use crate::error::Result;
use crate::parts::Parts;
use crate::weight::{PartRole, QuantWeight};

/// Groups of elements, in the order of the weight. A byte holds numbers of groups that are far apart:
///
/// ```text
/// 4 bits, 5 groups, packed in 3 rows      bits 0 to 3      bits 4 to 7
/// row 0                                   group 0          group 3
/// row 1                                   group 1          group 4
/// row 2                                   group 2          –
/// ```
///
/// Shifts that are integers are subtracted from packed numbers, others from what comes of number and scale; each step is rounded to
/// the scale's type, as quanto does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub struct QuantoBits {
    /// Bits of a number: 4 or 2.
    pub bits: u32,
    /// Elements that share a scale and a shift.
    pub group: u64,
}

impl fmt::Display for QuantoBits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "quanto qint{} with a scale and a shift for {}", self.bits, self.group)
    }
}

/// The decoder of such a weight, all sizes checked.
pub(crate) fn decoder<'a>(
    weight: &QuantWeight,
    format: QuantoBits,
    parts: &'a dyn Parts,
) -> Result<Box<dyn Decode + 'a>> {
    let elements = weight.elements()?;
    let group = format.group.max(1);
    if !matches!(format.bits, 2 | 4) {
        return Err(weight.bad_shape("numbers have 2 or 4 bits"));
    }
    if !elements.is_multiple_of(group) {
        return Err(weight.bad_shape("it is no whole number of groups"));
    }
    let groups = elements / group;
    let rows = groups.div_ceil(u64::from(8 / format.bits));
    let data = part_bytes(weight, weight.needs(PartRole::Data)?, parts, rows.saturating_mul(group))?;
    let numbers = |role| part_numbers(weight, role, parts, groups);
    let (scale, shift) = (numbers(PartRole::Scale)?, numbers(PartRole::ZeroPoint)?);
    let rows = (rows as usize).max(1);
    Ok(Box::new(Decoder { data, scale, shift, rows, group: group as usize, bits: format.bits }))
}

#[derive(Debug)]
struct Decoder<'a> {
    data: &'a [u8],
    scale: (&'a [u8], Number),
    shift: (&'a [u8], Number),
    /// Rows of packed groups.
    rows: usize,
    group: usize,
    bits: u32,
}

impl Decode for Decoder<'_> {
    fn granule(&self) -> usize {
        1
    }

    fn decode(&self, first: usize, out: &mut [f32]) {
        runs(first, out, self.group, |at, out| {
            let (group, column) = (at / self.group, at % self.group);
            let start = group % self.rows * self.group + column;
            let bit = self.bits * (group / self.rows) as u32;
            let mask = (1_u8 << self.bits) - 1;
            let number = self.scale.1;
            let (scale, shift) = (number.at(self.scale.0, group), self.shift.1.at(self.shift.0, group));
            // All numbers that the group can have: there are fewer than elements.
            let numbers: [f32; 16] = std::array::from_fn(|code| {
                let code = code as f32;
                if self.shift.1.is_float() {
                    number.round(number.round(scale * code) - shift)
                } else {
                    number.round(scale * (code - shift))
                }
            });
            for (out, &byte) in out.iter_mut().zip(&self.data[start..]) {
                *out = numbers[usize::from(byte >> bit & mask)];
            }
        });
    }
}
