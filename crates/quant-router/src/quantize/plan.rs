//! One weight to be quantized: what it will be, and its rows, quantized by all threads into memory of the caller.

use std::marker::PhantomData;
use std::ops::Range;

use checkpoint::TensorType;
use checkpoint::safetensors::dtype_from_name;
use rayon::prelude::*;

use super::affine::Ranges;
use super::source::{Brain, Float, Half, Single};
use super::symmetric::Rows;
use super::{QuantKind, affine};
use crate::error::{QuantError, Result};
use crate::formats::{Codes, Family, Global, Number, QuantoBits, Scaled, Scales};
use crate::weight::{Format, Part, PartRole, QuantWeight};
use crate::widest::widest;

/// Elements that one thread quantizes at a time, at least: 256 KiB of bf16, enough to be worth a task, in rows of several.
const PIECE: usize = 1 << 17;
/// The largest group, and what it is made smaller by until it divides the columns.
const GROUP: [u64; 2] = [128, 32];

/// Memory for all parts of one weight, each of the size that [`Quantizer::bytes`] says.
#[derive(Debug)]
pub struct QuantBuffers<'a> {
    /// Packed numbers.
    pub data: &'a mut [u8],
    /// Scales, in the type of the weight's floats.
    pub scale: &'a mut [u8],
    /// Shifts, in the same type. Empty for types of a byte, which have none.
    pub shift: &'a mut [u8],
}

/// A weight of floats that shall be quantized.
#[derive(Debug, Clone)]
pub struct Quantizer {
    weight: QuantWeight,
    kind: QuantKind,
    number: Number,
    rows: u64,
    columns: u64,
    /// Elements that share a scale.
    group: u64,
}

impl Quantizer {
    /// A weight with this name and shape, stored as F32, F16 or BF16. Rows are those of the first dimension, as in the weights of
    /// linear layers, embeddings and convolutions. An error if quanto has no such weight.
    pub fn new(name: &str, shape: &[u64], number: Number, kind: QuantKind) -> Result<Self> {
        let refuse = |why| QuantError::NotQuantizable {
            layer: name.into(),
            shape: shape.into(),
            kind: kind.name(),
            why,
        };
        let (&rows, others) = shape.split_first().ok_or_else(|| refuse("it has one number"))?;
        if others.is_empty() {
            return Err(refuse("it has no rows"));
        }
        if !number.is_float() {
            return Err(refuse("its numbers are none that models compute in"));
        }
        let product =
            |dimensions: &[u64]| dimensions.iter().try_fold(1_u64, |all, &next| all.checked_mul(next));
        let columns = product(others).ok_or_else(|| refuse("it has more than 2^64 elements"))?;
        let elements = product(shape).filter(|elements| elements.checked_mul(4).is_some());
        let elements = elements.ok_or_else(|| refuse("it has more than 2^64 bytes"))?;
        if elements == 0 {
            return Err(refuse("it is empty"));
        }
        let group = if kind.bits() == 8 { columns } else { group(columns) };
        let groups = elements / group;
        if kind.bits() < 8 && groups == 1 {
            return Err(refuse("it is a single group"));
        }
        let plain = |name: &str| dtype_from_name(name).map(TensorType::Plain).ok_or(QuantError::Internal);
        let float = plain(match number {
            Number::F16 => "F16",
            Number::Bf16 => "BF16",
            _ => "F32",
        })?;
        let part = |role, ending: &str, kind, shape: &[u64]| {
            let (tensor, shape) = (format!("{name}.{ending}"), shape.to_vec());
            Part { role, tensor, kind, shape }
        };
        let (format, parts) = if kind.bits() == 8 {
            let (family, codes, stored) = match kind {
                QuantKind::QFloat8E4m3 => (Family::QFloat8, Codes::E4m3, "F8_E4M3"),
                QuantKind::QFloat8E5m2 => (Family::QFloat8, Codes::E5m2, "F8_E5M2"),
                _ => (Family::QInt8, Codes::Int8, "I8"),
            };
            // One scale of all is no list of one to quanto.
            let one = rows == 1;
            let scales = if one { Scales::Tensor } else { Scales::Row };
            let mut scale = vec![1; if one { 0 } else { shape.len() }];
            if let Some(first) = scale.first_mut() {
                *first = rows;
            }
            let parts = vec![
                part(PartRole::Data, "_data", plain(stored)?, shape),
                part(PartRole::Scale, "_scale", float, &scale),
            ];
            let global = Global::None;
            (Format::Scaled(Scaled { family, codes, scales, global, zero_point: false }), parts)
        } else {
            let packed = groups.div_ceil(u64::from(8 / kind.bits()));
            let parts = vec![
                part(PartRole::Data, "_data._data", plain("U8")?, &[packed, group]),
                part(PartRole::Scale, "_scale", float, &[groups, 1]),
                part(PartRole::ZeroPoint, "_shift", float, &[groups, 1]),
            ];
            (Format::QuantoBits(QuantoBits { bits: kind.bits(), group }), parts)
        };
        let (name, shape) = (name.to_owned(), shape.to_vec());
        let weight = QuantWeight { name, shape, format, parts, transforms: Vec::new() };
        Ok(Self { weight, kind, number, rows, columns, group })
    }

    /// What it becomes: its parts, named as quanto names them, with types and shapes.
    pub fn weight(&self) -> &QuantWeight {
        &self.weight
    }

    /// How many bytes a part has; 0 if there is no such part.
    pub fn bytes(&self, role: PartRole) -> u64 {
        let Some(part) = self.weight.part(role) else { return 0 };
        let number = Number::of(part.kind).map_or(1, Number::bytes);
        // All are smaller than the weight itself, whose bytes were counted.
        part.shape.iter().product::<u64>().saturating_mul(number as u64)
    }

    /// Quantizes some rows, which `source` holds and nothing else, into their place in the buffers of the whole weight; what is
    /// there of other rows stays. Uses the threads of the rayon pool that it is called in. On an error nothing was written.
    pub fn quantize(&self, source: &[u8], rows: Range<u64>, into: &mut QuantBuffers<'_>) -> Result<()> {
        let layer = || self.weight.name.clone();
        if rows.start > rows.end || rows.end > self.rows {
            let (start, end) = (rows.start, rows.end);
            return Err(QuantError::Rows { layer: layer(), start, end, rows: self.rows });
        }
        let need = (rows.end - rows.start) * self.columns * self.number.bytes() as u64;
        let have = source.len() as u64;
        if have != need {
            return Err(QuantError::SourceSize { layer: layer(), have, need });
        }
        let given = [
            (PartRole::Data, into.data.len()),
            (PartRole::Scale, into.scale.len()),
            (PartRole::ZeroPoint, into.shift.len()),
        ];
        for (role, have) in given {
            let (have, need) = (have as u64, self.bytes(role));
            if have != need {
                let tensor = self.weight.part(role).map_or_else(String::new, |part| part.tensor.clone());
                return Err(QuantError::PartSize { layer: layer(), role, tensor, have, need });
            }
        }
        let range = rows.start as usize..rows.end as usize;
        match (self.number, self.kind.bits()) {
            (Number::F16, 8) => self.bytes_of::<Half>(source, range, into),
            (Number::Bf16, 8) => self.bytes_of::<Brain>(source, range, into),
            (_, 8) => self.bytes_of::<Single>(source, range, into),
            (Number::F16, _) => self.bits_of::<Half>(source, range, into),
            (Number::Bf16, _) => self.bits_of::<Brain>(source, range, into),
            _ => self.bits_of::<Single>(source, range, into),
        }
        Ok(())
    }

    /// Types of a byte: rows are independent.
    fn bytes_of<F: Float>(&self, source: &[u8], rows: Range<usize>, into: &mut QuantBuffers<'_>) {
        let columns = self.columns as usize;
        let piece = PIECE.div_ceil(columns);
        let data = into.data[rows.start * columns..rows.end * columns].par_chunks_mut(piece * columns);
        let scale = into.scale[rows.start * F::BYTES..rows.end * F::BYTES].par_chunks_mut(piece * F::BYTES);
        let source = source.par_chunks(piece * columns * F::BYTES);
        source.zip(data.zip(scale)).for_each(|(from, (data, scale))| {
            widest(Rows::<F> { kind: self.kind, columns, from, data, scale, float: PhantomData });
        });
    }

    /// Types below a byte: first all ranges, by group, then all codes, by the bytes that groups share.
    fn bits_of<F: Float>(&self, source: &[u8], rows: Range<usize>, into: &mut QuantBuffers<'_>) {
        let (group, bits) = (self.group as usize, self.kind.bits());
        let per_row = (self.columns / self.group) as usize;
        let groups = rows.start * per_row..rows.end * per_row;
        let numbers = groups.start * F::BYTES..groups.end * F::BYTES;
        let piece = PIECE.div_ceil(group);
        let bytes = group * F::BYTES;
        {
            let scale = into.scale[numbers.clone()].par_chunks_mut(piece * F::BYTES);
            let shift = into.shift[numbers].par_chunks_mut(piece * F::BYTES);
            source.par_chunks(piece * bytes).zip(scale.zip(shift)).for_each(|(from, (scale, shift))| {
                widest(Ranges::<F> { bits, group, from, scale, shift, float: PhantomData });
            });
        }
        let (scale, shift) = (&*into.scale, &*into.shift);
        let (packed, all) = (into.data.len() / group, (self.rows * self.columns / self.group) as usize);
        into.data.par_chunks_mut(group).with_min_len(piece).enumerate().for_each(|(row, data)| {
            for slot in 0..8 / bits {
                let at = row + slot as usize * packed;
                if at >= all {
                    affine::clear(bits, slot * bits, data);
                } else if groups.contains(&at) {
                    let from = &source[(at - groups.start) * bytes..][..bytes];
                    let range = [scale, shift].map(|numbers| self.number.at(numbers, at));
                    let bit = slot * bits;
                    widest(affine::Codes::<F> { bits, bit, from, range, data, float: PhantomData });
                }
            }
        });
    }
}

/// Elements of a group: the largest of 128, 96, 64 and 32 that divides the columns, and the row where none does or it is short.
fn group(columns: u64) -> u64 {
    let [largest, step] = GROUP;
    if columns <= largest {
        return columns;
    }
    let mut sizes = (1..=largest / step).rev().map(|steps| steps * step);
    sizes.find(|&size| columns.is_multiple_of(size)).unwrap_or(columns)
}

#[cfg(test)]
mod tests {
    #[test]
    fn groups_are_those_that_quanto_chooses() {
        let cases =
            [(1, 1), (128, 128), (129, 129), (192, 96), (256, 128), (160, 32), (320, 64), (1000, 1000)];
        for (columns, expected) in cases {
            assert_eq!(super::group(columns), expected, "{columns}");
        }
    }
}
