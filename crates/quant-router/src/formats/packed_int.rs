//! GPTQ, AWQ and compressed-tensors: unsigned numbers of 2, 3, 4 or 8 bits in 32-bit words, with a scale and a zero point for each
//! group of columns of a row. Numbers follow each other without gaps, so that those of 3 bits may begin in one word and end in the next.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::numbers::{Number, part_numbers, runs};
use crate::dequantize::{Decode, part_bytes};
use crate::error::{QuantError, Result};
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
    /// Columns, as with [`Words::Columns`], the words of a row beside each other and whole: as compressed-tensors packs them.
    Along,
}

/// Unsigned numbers in words. A number of the weight is (packed number − zero point) × scale. Scales and zero points lie by groups, those
/// of all rows together; zero points of rows that follow each other share a word, in the words' own order. With [`Words::Along`] they lie
/// by rows, or by words of rows, those of all groups together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub struct PackedInt {
    /// Bits of a number: 2, 3, 4 or 8; with [`Words::Rows`] 4.
    pub bits: u32,
    /// What shares a word.
    pub words: Words,
    /// Columns of a group.
    pub group: u64,
    /// Whether [`PartRole::GroupIndex`] says which group a column is in; otherwise they follow each other.
    pub indexed: bool,
    /// Whether zero points are stored less one, as in the first version of GPTQ's files.
    pub zero_less_one: bool,
    /// Whether there are no zero points, and each is half of what numbers can be.
    #[serde(default)]
    pub symmetric: bool,
}

impl fmt::Display for PackedInt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.words {
            Words::Columns => "GPTQ",
            Words::Rows => "AWQ",
            Words::Along => "compressed-tensors",
        };
        let zero = if self.symmetric { "" } else { " and a zero point" };
        write!(f, "{name} in {} bits with a scale{zero} for {}", self.bits, self.group)?;
        if self.indexed { f.write_str(" in an order of its own") } else { Ok(()) }
    }
}

/// Words that so many numbers fill; only the last may have room left.
pub(crate) fn words_of(numbers: u64, bits: u32) -> Option<u64> {
    Some(numbers.checked_mul(bits.into())?.div_ceil(32))
}

/// The decoder of such a weight, all sizes and the groups of all columns checked.
pub(crate) fn decoder<'a>(
    weight: &QuantWeight,
    format: PackedInt,
    parts: &'a dyn Parts,
) -> Result<Box<dyn Decode + 'a>> {
    weight.elements()?;
    let &[rows, columns] = weight.shape.as_slice() else {
        return Err(weight.bad_shape("it is no matrix"));
    };
    if !matches!(format.bits, 2 | 3 | 4 | 8) || format.words == Words::Rows && format.bits != 4 {
        return Err(weight.bad_shape("numbers have 2, 3, 4 or 8 bits"));
    }
    let packed = |numbers| words_of(numbers, format.bits).unwrap_or(u64::MAX);
    let whole = |numbers: u64| (numbers.wrapping_mul(format.bits.into())).is_multiple_of(32);
    let (row_words, column_words) = (packed(rows), packed(columns));
    let words = match format.words {
        Words::Columns => column_words.saturating_mul(rows),
        Words::Rows => row_words.saturating_mul(columns),
        Words::Along => rows.saturating_mul(column_words),
    };
    let cut = match format.words {
        Words::Columns => !whole(rows) || !whole(columns),
        Words::Rows => !whole(rows),
        Words::Along => false,
    };
    if cut {
        return Err(weight.bad_shape("its rows or columns are no whole words"));
    }
    let groups = columns.div_ceil(format.group.max(1));
    let bytes = |role, need| part_bytes(weight, weight.needs(role)?, parts, need);
    let data = bytes(PartRole::Data, words.saturating_mul(4))?;
    let zero = if format.symmetric {
        None
    } else {
        Some(bytes(PartRole::ZeroPoint, row_words.saturating_mul(groups).saturating_mul(4))?)
    };
    let scale = part_numbers(weight, PartRole::Scale, parts, rows.saturating_mul(groups))?;
    let index =
        if format.indexed { Some(bytes(PartRole::GroupIndex, columns.saturating_mul(4))?) } else { None };
    if let Some(index) = index {
        known_groups(weight, index, groups)?;
    }
    let [rows, columns, groups, row_words, column_words] =
        [rows, columns, groups, row_words, column_words].map(|count| count as usize);
    Ok(Box::new(Decoder { format, data, zero, scale, index, rows, columns, groups, row_words, column_words }))
}

/// An error if a column is in a group that there is not. A few thousand numbers, looked at each time: it costs less than decoding one
/// row, and the index may lie in a file that was changed.
fn known_groups(weight: &QuantWeight, index: &[u8], groups: u64) -> Result<()> {
    let mut named = index.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
    let known = |group: i32| u64::try_from(group).is_ok_and(|group| group < groups);
    let Some(column) = named.clone().position(|group| !known(group)) else { return Ok(()) };
    Err(QuantError::NoSuchGroup {
        layer: weight.name.clone(),
        tensor: weight.needs(PartRole::GroupIndex)?.tensor.clone(),
        column: column as u64,
        group: named.nth(column).unwrap_or_default(),
        groups,
    })
}

#[derive(Debug)]
struct Decoder<'a> {
    format: PackedInt,
    data: &'a [u8],
    zero: Option<&'a [u8]>,
    scale: (&'a [u8], Number),
    index: Option<&'a [u8]>,
    rows: usize,
    columns: usize,
    groups: usize,
    /// Words that numbers of all rows fill, and of all columns.
    row_words: usize,
    column_words: usize,
}

impl Decode for Decoder<'_> {
    fn granule(&self) -> usize {
        1
    }

    fn decode(&self, first: usize, out: &mut [f32]) {
        runs(first, out, self.columns, |at, out| {
            let row = at / self.columns;
            let mut last = None;
            let mut range = [0.0; 2];
            for (column, out) in (at % self.columns..).zip(out) {
                let group = self.group(column);
                if last != Some(group) {
                    last = Some(group);
                    range = self.range(row, group);
                }
                *out = (self.number(row, column) - range[0]) * range[1];
            }
        });
    }
}

impl Decoder<'_> {
    /// The group of a column.
    fn group(&self, column: usize) -> usize {
        match self.index {
            None => column / self.format.group.max(1) as usize,
            Some(index) => word(index, column) as usize,
        }
    }

    /// The zero point and the scale of a group; not a number if there is no such group, as where a mapped index was changed after it was
    /// checked.
    fn range(&self, row: usize, group: usize) -> [f32; 2] {
        if group >= self.groups {
            return [0.0, f32::NAN];
        }
        let along = self.format.words == Words::Along;
        let zero = match self.zero {
            None => (1_u32 << (self.format.bits - 1)) as f32,
            Some(words) if along => self.bits(words, group, self.groups, row),
            Some(words) => self.bits(words, group * self.row_words, 1, row),
        };
        let zero = zero + if self.format.zero_less_one { 1.0 } else { 0.0 };
        let at = if along { row * self.groups + group } else { group * self.rows + row };
        [zero, self.scale.1.at(self.scale.0, at)]
    }

    /// A packed number.
    fn number(&self, row: usize, column: usize) -> f32 {
        match self.format.words {
            Words::Columns => self.bits(self.data, row, self.rows, column),
            Words::Rows => self.bits(self.data, column * self.row_words, 1, row),
            Words::Along => self.bits(self.data, row * self.column_words, 1, column),
        }
    }

    /// The number at a place of those in a line of words, which begins at one word and has the next ones so many words apart.
    fn bits(&self, words: &[u8], first: usize, apart: usize, place: usize) -> f32 {
        let place =
            if self.format.words == Words::Rows { place / 8 * 8 + AWQ_PLACES[place % 8] } else { place };
        let bits = self.format.bits as usize;
        let (index, shift) = (place * bits / 32, place * bits % 32);
        let mut number = word(words, first + index * apart) >> shift;
        if shift + bits > 32 {
            number |= word(words, first + (index + 1) * apart) << (32 - shift);
        }
        (number & ((1 << bits) - 1)) as f32
    }
}

/// A word of a tensor. Zero behind its end, which sizes that were checked rule out.
fn word(bytes: &[u8], index: usize) -> u32 {
    bytes.as_chunks().0.get(index).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}
