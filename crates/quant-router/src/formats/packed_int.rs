//! GPTQ and AWQ: unsigned numbers of 2, 4 or 8 bits in 32-bit words, columns of the weight below each other, with a scale and a zero
//! point for each group of columns of a row.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::numbers::{Number, part_numbers};
use crate::dequantize::{Decode, part_bytes};
use crate::error::Result;
use crate::parts::Parts;
use crate::weight::{PartRole, QuantWeight};

/// Where in a word of `AutoAWQ` the number of a row is, by the row's place among eight.
const AWQ_PLACES: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// What shares a 32-bit word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum Words {
    /// Columns of the weight that follow each other, the first in the lowest bits: as GPTQ packs them.
    Columns,
    /// Eight rows that follow each other, in the order 0, 2, 4, 6, 1, 3, 5, 7: as `AutoAWQ` packs them for its GEMM.
    Rows,
}

/// Unsigned numbers in words. A number of the weight is (packed number − zero point) × scale. Scales and zero points lie by groups, those
/// of all rows together; zero points of rows that follow each other share a word, in the words' own order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub struct PackedInt {
    /// Bits of a number: 2, 4 or 8; with [`Words::Rows`] 4.
    pub bits: u32,
    /// What shares a word.
    pub words: Words,
    /// Columns of a group.
    pub group: u64,
    /// Whether [`PartRole::GroupIndex`] says which group a column is in; otherwise they follow each other.
    pub indexed: bool,
    /// Whether zero points are stored less one, as in the first version of GPTQ's files.
    pub zero_less_one: bool,
}

impl fmt::Display for PackedInt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.words == Words::Rows { "AWQ" } else { "GPTQ" };
        write!(f, "{name} in {} bits with a scale and a zero point for {}", self.bits, self.group)?;
        if self.indexed { f.write_str(" in an order of its own") } else { Ok(()) }
    }
}

/// The decoder of such a weight, all sizes checked.
pub(crate) fn decoder<'a>(
    weight: &QuantWeight,
    format: PackedInt,
    parts: &'a dyn Parts,
) -> Result<Box<dyn Decode + 'a>> {
    let elements = weight.elements()?;
    let &[rows, columns] = weight.shape.as_slice() else {
        return Err(weight.bad_shape("it is no matrix"));
    };
    if !matches!(format.bits, 2 | 4 | 8) || format.words == Words::Rows && format.bits != 4 {
        return Err(weight.bad_shape("numbers have 2, 4 or 8 bits"));
    }
    let per_word = u64::from(32 / format.bits);
    let packed = if format.words == Words::Columns { columns } else { rows };
    if !rows.is_multiple_of(per_word) || !packed.is_multiple_of(per_word) {
        return Err(weight.bad_shape("its rows or columns are no whole words"));
    }
    let groups = columns.div_ceil(format.group.max(1));
    let bytes = |role, need| part_bytes(weight, weight.needs(role)?, parts, need);
    let data = bytes(PartRole::Data, elements / per_word * 4)?;
    let zero = bytes(PartRole::ZeroPoint, (rows / per_word).saturating_mul(groups).saturating_mul(4))?;
    let scale = part_numbers(weight, PartRole::Scale, parts, rows.saturating_mul(groups))?;
    let index =
        if format.indexed { Some(bytes(PartRole::GroupIndex, columns.saturating_mul(4))?) } else { None };
    let [rows, columns, groups] = [rows, columns, groups].map(|count| count as usize);
    Ok(Box::new(Decoder { format, data, zero, scale, index, rows, columns, groups }))
}

#[derive(Debug)]
struct Decoder<'a> {
    format: PackedInt,
    data: &'a [u8],
    zero: &'a [u8],
    scale: (&'a [u8], Number),
    index: Option<&'a [u8]>,
    rows: usize,
    columns: usize,
    groups: usize,
}

impl Decode for Decoder<'_> {
    fn granule(&self) -> usize {
        1
    }

    fn decode(&self, first: usize, out: &mut [f32]) {
        let mut last = None;
        let mut range = [0.0; 2];
        for (at, out) in (first..).zip(out) {
            let (row, column) = (at / self.columns, at % self.columns);
            let group = self.group(column);
            if last != Some((row, group)) {
                last = Some((row, group));
                range = self.range(row, group);
            }
            let number = match self.format.words {
                Words::Columns => self.number(self.data, column, row),
                Words::Rows => self.number(self.data, row, column),
            };
            *out = (number - range[0]) * range[1];
        }
    }
}

impl Decoder<'_> {
    /// The group of a column; beyond them all if the file says one that there is not.
    fn group(&self, column: usize) -> usize {
        match self.index {
            None => column / self.format.group.max(1) as usize,
            Some(index) => word(index, column) as usize,
        }
    }

    /// The zero point and the scale of a group; not a number if there is no such group.
    fn range(&self, row: usize, group: usize) -> [f32; 2] {
        if group >= self.groups {
            return [0.0, f32::NAN];
        }
        let per_word = 32 / self.format.bits as usize;
        let words = &self.zero[group * (self.rows / per_word) * 4..];
        let zero = self.bits(word(words, row / per_word), row % per_word);
        let zero = zero + if self.format.zero_less_one { 1.0 } else { 0.0 };
        [zero, self.scale.1.at(self.scale.0, group * self.rows + row)]
    }

    /// A packed number, by its place in the dimension that words go along and in the other.
    fn number(&self, data: &[u8], packed: usize, other: usize) -> f32 {
        let per_word = 32 / self.format.bits as usize;
        let at = match self.format.words {
            Words::Columns => packed / per_word * self.rows + other,
            Words::Rows => other * (self.rows / per_word) + packed / per_word,
        };
        self.bits(word(data, at), packed % per_word)
    }

    /// A number of a word.
    fn bits(&self, word: u32, place: usize) -> f32 {
        let place = if self.format.words == Words::Rows { AWQ_PLACES[place] } else { place };
        (word >> (place as u32 * self.format.bits) & ((1 << self.format.bits) - 1)) as f32
    }
}

/// A word of a tensor. Zero behind its end, which sizes that were checked rule out.
fn word(bytes: &[u8], index: usize) -> u32 {
    bytes.as_chunks().0.get(index).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}
