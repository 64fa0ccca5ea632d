//! The 4-bit formats of bitsandbytes: indexes into 16 numbers, times the largest number of their block, which may be quantized
//! itself.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::numbers::{Number, pairs, runs};
use crate::dequantize::{Decode, part_bytes};
use crate::error::Result;
use crate::parts::Parts;
use crate::weight::{PartRole, QuantWeight};

/// Which 16 numbers the file holds. The file's own are taken, whatever they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum BnbKind {
    /// Quantiles of the normal distribution.
    Nf4,
    /// Numbers with a sign, two bits of exponent and one of mantissa.
    Fp4,
}

/// How the largest numbers of blocks are quantized themselves: indexes of a byte into [`PartRole::ScaleCodebook`], times
/// [`PartRole::GlobalScale`] of their own block, plus an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub struct Nested {
    /// Scales that share one of their own.
    pub block: u64,
    /// The bits of the f32 that is added.
    pub offset_bits: u32,
}

/// Two indexes a byte, the first in the upper half, over the weight's elements in order.
///
/// [`PartRole::Data`] are the indexes, [`PartRole::Codebook`] the 16 numbers, [`PartRole::Scale`] one for each block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub struct Bnb4 {
    /// Which numbers.
    pub kind: BnbKind,
    /// Elements that share a scale.
    pub block: u64,
    /// Whether and how scales are quantized.
    pub nested: Option<Nested>,
}

impl fmt::Display for Bnb4 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.kind == BnbKind::Nf4 { "NF4" } else { "FP4" };
        let nested = if self.nested.is_some() { ", quantized itself" } else { "" };
        write!(f, "bitsandbytes {kind} with a scale for {}{nested}", self.block)
    }
}

/// The decoder of such a weight, all sizes checked.
pub(crate) fn decoder<'a>(
    weight: &QuantWeight,
    format: Bnb4,
    parts: &'a dyn Parts,
) -> Result<Box<dyn Decode + 'a>> {
    let elements = weight.elements()?;
    let count = elements.div_ceil(format.block.max(1));
    let bytes = |role, need| part_bytes(weight, weight.needs(role)?, parts, need);
    let data = bytes(PartRole::Data, elements.div_ceil(2))?;
    let table = |role, length: u64| -> Result<Vec<f32>> {
        let bytes = bytes(role, length * 4)?;
        Ok((0..length as usize).map(|at| Number::F32.at(bytes, at)).collect())
    };
    let scales = match format.nested {
        None => Scale::Plain(bytes(PartRole::Scale, count.saturating_mul(4))?),
        Some(nested) => Scale::Nested {
            indexes: bytes(PartRole::Scale, count)?,
            table: table(PartRole::ScaleCodebook, 256)?,
            scales: bytes(PartRole::GlobalScale, count.div_ceil(nested.block.max(1)).saturating_mul(4))?,
            block: nested.block.max(1) as usize,
            offset: f32::from_bits(nested.offset_bits),
        },
    };
    let codebook = bytes(PartRole::Codebook, 64)?;
    let numbers = std::array::from_fn(|at| Number::F32.at(codebook, at));
    Ok(Box::new(Decoder { data, numbers, scales, block: format.block.max(1) as usize }))
}

#[derive(Debug)]
enum Scale<'a> {
    Plain(&'a [u8]),
    Nested { indexes: &'a [u8], table: Vec<f32>, scales: &'a [u8], block: usize, offset: f32 },
}

impl Scale<'_> {
    fn at(&self, index: usize) -> f32 {
        match self {
            Self::Plain(bytes) => Number::F32.at(bytes, index),
            Self::Nested { indexes, table, scales, block, offset } => {
                table[usize::from(indexes[index])] * Number::F32.at(scales, index / block) + offset
            }
        }
    }
}

#[derive(Debug)]
struct Decoder<'a> {
    data: &'a [u8],
    numbers: [f32; 16],
    scales: Scale<'a>,
    block: usize,
}

impl Decode for Decoder<'_> {
    fn granule(&self) -> usize {
        1
    }

    fn decode(&self, first: usize, out: &mut [f32]) {
        runs(first, out, self.block, |at, out| {
            let scale = self.scales.at(at / self.block);
            let numbers = self.numbers.map(|number| number * scale);
            pairs(self.data, at, out, 4, &numbers);
        });
    }
}
