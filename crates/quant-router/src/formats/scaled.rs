//! Weights whose packed numbers are multiplied with a scale of their tensor, row or block: FP8, INT8, NVFP4, MXFP8 and their
//! kin. They differ in the numbers, in the blocks, and in what else is multiplied.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::grid::{Grid, Order, swizzled};
use super::numbers::{E2M1, E4M3, E5M2, I8, Number, pairs};
use crate::dequantize::{Decode, part_bytes};
use crate::error::{QuantError, Result};
use crate::parts::Parts;
use crate::weight::{PartRole, QuantWeight};

/// How packed numbers are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum Codes {
    /// FP8 with four bits of exponent.
    E4m3,
    /// FP8 with five bits of exponent.
    E5m2,
    /// Bytes with a sign.
    Int8,
    /// Two numbers of 4 bits a byte, E2M1, the first one in the upper half.
    E2m1High,
    /// As before, the first one in the lower half.
    E2m1Low,
}

impl Codes {
    /// Numbers that share a byte.
    pub fn per_byte(self) -> u64 {
        match self {
            Self::E2m1High | Self::E2m1Low => 2,
            _ => 1,
        }
    }
}

/// What shares a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum Scales {
    /// There is none: the packed numbers are the weight's.
    None,
    /// The whole tensor.
    Tensor,
    /// Everything at one place of the first dimension.
    Row,
    /// A block of a matrix; the last ones may be cut by its edge.
    Blocks {
        /// Rows of a block.
        rows: u64,
        /// Columns of a block.
        columns: u64,
        /// How the file orders the scales.
        order: Order,
    },
}

/// What is multiplied besides the scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum Global {
    /// Nothing.
    None,
    /// The scale is first multiplied with the part [`PartRole::GlobalScale`].
    Factor,
    /// The scale is first divided by the part [`PartRole::GlobalScale`].
    Divisor,
    /// Number and scale are multiplied with [`PartRole::GlobalScale`] × [`PartRole::InputScale`].
    TimesInput,
    /// Number and scale are multiplied with 1 ÷ ([`PartRole::GlobalScale`] × i) × i, where i is 2688 ÷ [`PartRole::InputScale`].
    InverseOfInput,
    /// Divided by 127: the scale is the largest number of the row.
    Per127,
}

/// The name of a scaled format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum Family {
    /// FP8 weights with or without scales.
    Fp8,
    /// INT8 weights with scales.
    Int8,
    /// Blocks of 16 numbers of 4 bits with FP8 scales.
    NvFp4,
    /// Blocks of 32 FP8 numbers with powers of two as scales.
    MxFp8,
    /// The row-wise INT8 of bitsandbytes.
    BnbInt8,
    /// The qint8 of optimum-quanto.
    QInt8,
    /// The qfloat8 of optimum-quanto.
    QFloat8,
    /// An INT8 or FP8 tensor of torchao.
    TorchAo,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Fp8 => "FP8",
            Self::Int8 => "INT8",
            Self::NvFp4 => "NVFP4",
            Self::MxFp8 => "MXFP8",
            Self::BnbInt8 => "bitsandbytes INT8",
            Self::QInt8 => "quanto qint8",
            Self::QFloat8 => "quanto qfloat8",
            Self::TorchAo => "torchao",
        })
    }
}

/// Packed numbers times scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub struct Scaled {
    /// What it is called.
    pub family: Family,
    /// The packed numbers.
    pub codes: Codes,
    /// What shares a scale.
    pub scales: Scales,
    /// What else is multiplied.
    pub global: Global,
    /// Whether the part [`PartRole::ZeroPoint`], ordered as the scales, is subtracted from packed numbers first.
    pub zero_point: bool,
}

impl Scaled {
    /// Rows × columns that share a scale; `u64::MAX` for all.
    pub fn block(&self) -> [u64; 2] {
        match self.scales {
            Scales::None => [1, 1],
            Scales::Tensor => [u64::MAX, u64::MAX],
            Scales::Row => [1, u64::MAX],
            Scales::Blocks { rows, columns, .. } => [rows, columns],
        }
    }
}

impl fmt::Display for Scaled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.family)?;
        match self.scales {
            Scales::None => f.write_str(" without scales"),
            Scales::Tensor => f.write_str(" with one scale"),
            Scales::Row => f.write_str(" with a scale a row"),
            Scales::Blocks { rows, columns, .. } => write!(f, " with a scale for {rows} × {columns}"),
        }
    }
}

/// The matrix that scales are laid over: the first dimension, and all others; for blocks all but the last, so that matrices lie
/// below each other.
pub(crate) fn matrix(weight: &QuantWeight, scales: Scales) -> Result<[u64; 2]> {
    let elements = weight.elements()?;
    if let (Scales::Blocks { .. }, [_, _, .., columns]) = (scales, &weight.shape[..]) {
        return Ok([elements.checked_div(*columns).unwrap_or(0), *columns]);
    }
    let (rows, others) = match weight.shape.split_first() {
        Some((&rows, others)) if !others.is_empty() => (rows, others),
        _ => (1, &weight.shape[..]),
    };
    // Saturation is for empty weights only: all others have fewer elements than 2^64.
    let product = |product: u64, &next: &u64| product.saturating_mul(next);
    Ok([rows, if others.contains(&0) { 0 } else { others.iter().fold(1, product) }])
}

/// How many blocks there are below and beside each other.
pub(crate) fn blocks(scales: Scales, [rows, columns]: [u64; 2]) -> [u64; 2] {
    match scales {
        Scales::None | Scales::Tensor => [1, 1],
        Scales::Row => [rows, 1],
        Scales::Blocks { rows: height, columns: width, .. } => {
            [rows.div_ceil(height.max(1)), columns.div_ceil(width.max(1))]
        }
    }
}

/// The decoder of a scaled weight, all sizes checked.
pub(crate) fn decoder<'a>(
    weight: &QuantWeight,
    scaled: Scaled,
    parts: &'a dyn Parts,
) -> Result<Box<dyn Decode + 'a>> {
    let elements = weight.elements()?;
    let [rows, columns] = matrix(weight, scaled.scales)?;
    let per_byte = scaled.codes.per_byte();
    if columns % per_byte != 0 {
        return Err(weight.bad_shape("its rows are no whole bytes"));
    }
    let data = part_bytes(weight, weight.needs(PartRole::Data)?, parts, elements / per_byte)?;
    let order = if let Scales::Blocks { order, .. } = scaled.scales { order } else { Order::Rows };
    let count = blocks(scaled.scales, [rows, columns]);
    let stored = if order == Order::Swizzled { swizzled(count) } else { count };
    let need = stored[0].checked_mul(stored[1]).ok_or_else(|| weight.bad_shape("it has too many scales"))?;
    let grid = |role| -> Result<Grid<'a>> {
        let part = weight.needs(role)?;
        let number = match number(weight, role)? {
            // Files name the type of these scales or leave it a byte: a power of two either way.
            Number::U8 if scaled.family == Family::MxFp8 => Number::E8m0,
            number => number,
        };
        let bytes = part_bytes(weight, part, parts, need.saturating_mul(number.bytes() as u64))?;
        Ok(Grid { bytes, number, order, blocks: [count[0] as usize, count[1] as usize] })
    };
    let scale = if scaled.scales == Scales::None { None } else { Some(grid(PartRole::Scale)?) };
    let zero_point = if scaled.zero_point { Some(grid(PartRole::ZeroPoint)?) } else { None };
    let (first, last) = match scaled.global {
        Global::None | Global::Divisor => (1.0, 1.0),
        Global::Factor => (scalar(weight, PartRole::GlobalScale, parts)?, 1.0),
        Global::TimesInput => {
            let factor = scalar(weight, PartRole::GlobalScale, parts)?;
            (1.0, factor * scalar(weight, PartRole::InputScale, parts)?)
        }
        Global::InverseOfInput => {
            let input = 2688.0 / scalar(weight, PartRole::InputScale, parts)?;
            (1.0, 1.0 / (input * scalar(weight, PartRole::GlobalScale, parts)?) * input)
        }
        Global::Per127 => (1.0, 1.0 / 127.0),
    };
    let divisor = match scaled.global {
        Global::Divisor => Some(scalar(weight, PartRole::GlobalScale, parts)?),
        _ => None,
    };
    let block = match scaled.scales {
        Scales::Blocks { rows, columns, .. } => [rows.max(1) as usize, columns.max(1) as usize],
        Scales::Row => [1, usize::MAX],
        Scales::None | Scales::Tensor => [usize::MAX, usize::MAX],
    };
    let columns = (columns as usize).max(1);
    Ok(Box::new(Decoder {
        data,
        codes: scaled.codes,
        columns,
        block,
        scale,
        zero_point,
        first,
        divisor,
        last,
    }))
}

/// The number type of a part.
fn number(weight: &QuantWeight, role: PartRole) -> Result<Number> {
    let part = weight.needs(role)?;
    Number::of(part.kind).ok_or_else(|| QuantError::PartKind {
        layer: weight.name.clone(),
        tensor: part.tensor.clone(),
        have: format!("{} {:?}", part.kind, part.shape),
        need: "numbers".into(),
    })
}

/// The one number of a part.
fn scalar(weight: &QuantWeight, role: PartRole, parts: &dyn Parts) -> Result<f32> {
    let number = number(weight, role)?;
    let bytes = part_bytes(weight, weight.needs(role)?, parts, number.bytes() as u64)?;
    Ok(number.at(bytes, 0))
}

#[derive(Debug)]
struct Decoder<'a> {
    data: &'a [u8],
    codes: Codes,
    columns: usize,
    block: [usize; 2],
    scale: Option<Grid<'a>>,
    zero_point: Option<Grid<'a>>,
    /// Multiplied with the scale.
    first: f32,
    /// What the scale is divided by.
    divisor: Option<f32>,
    /// Multiplied with what comes of number and scale.
    last: f32,
}

impl Decode for Decoder<'_> {
    fn granule(&self) -> usize {
        self.codes.per_byte() as usize
    }

    fn decode(&self, first: usize, out: &mut [f32]) {
        let mut done = 0;
        while done < out.len() {
            let at = first + done;
            let (row, column) = (at / self.columns, at % self.columns);
            let place = [row / self.block[0], column / self.block[1]];
            // Up to the end of the block, of the row or of what was asked for, whichever comes first.
            let end = (place[1] + 1).saturating_mul(self.block[1]).min(self.columns);
            let run = (end - column).min(out.len() - done);
            let numbers = &mut out[done..done + run];
            self.codes(at, numbers);
            if let Some(zero_point) = self.zero_point {
                let zero_point = zero_point.at(place[0], place[1]);
                for number in &mut *numbers {
                    *number -= zero_point;
                }
            }
            if let Some(scale) = self.scale {
                let (scale, last) = (scale.at(place[0], place[1]) * self.first, self.last);
                let scale = self.divisor.map_or(scale, |divisor| scale / divisor);
                // Times 1 changes no number, so that most formats pay nothing for the few that have a second factor.
                for number in &mut *numbers {
                    *number = *number * scale * last;
                }
            }
            done += run;
        }
    }
}

impl Decoder<'_> {
    /// Packed numbers, from one that begins a byte or follows within a row.
    fn codes(&self, first: usize, out: &mut [f32]) {
        let whole = |table: &[f32; 256], out: &mut [f32]| {
            for (number, &byte) in out.iter_mut().zip(&self.data[first..]) {
                *number = table[usize::from(byte)];
            }
        };
        match self.codes {
            Codes::E4m3 => whole(&E4M3, out),
            Codes::E5m2 => whole(&E5M2, out),
            Codes::Int8 => whole(&I8, out),
            Codes::E2m1High => pairs(self.data, first, out, 4, &E2M1),
            Codes::E2m1Low => pairs(self.data, first, out, 0, &E2M1),
        }
    }
}
