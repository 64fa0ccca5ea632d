//! The small number types of quantized files as f32: tables for those of a byte and less, and numbers in a file's bytes.

use checkpoint::TensorType;
use half::{bf16, f16};
use serde::Serialize;

use crate::dequantize::part_bytes;
use crate::error::{QuantError, Result};
use crate::parts::Parts;
use crate::weight::{PartRole, QuantWeight};

/// Numbers of 4 bits: E2M1, the sign first. Zero, six steps and their negatives.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
/// FP8 with four bits of exponent, as `F8_E4M3` of safetensors: no infinity, and 448 is the largest.
pub static E4M3: [f32; 256] = table(4, 3, false);
/// FP8 with five bits of exponent, as `F8_E5M2` of safetensors: the upper half of an f16.
pub static E5M2: [f32; 256] = table(5, 2, true);
/// Bytes with a sign.
pub static I8: [f32; 256] = integers();

/// All numbers of a byte with a sign, an exponent and a mantissa.
const fn table(exponent_bits: u32, mantissa_bits: u32, infinite: bool) -> [f32; 256] {
    let mut numbers = [0.0; 256];
    let mut byte = 0_u32;
    while byte < 256 {
        let sign = (byte >> 7) << 31;
        let exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1);
        let mantissa = byte & ((1 << mantissa_bits) - 1);
        let bias = (1 << (exponent_bits - 1)) - 1;
        let top = (1 << exponent_bits) - 1;
        let positive = if exponent == top && infinite {
            if mantissa == 0 { f32::INFINITY } else { f32::NAN }
        } else if exponent == top && mantissa + 1 == 1 << mantissa_bits {
            f32::NAN
        } else if exponent == 0 {
            mantissa as f32 * f32::from_bits((128 - bias - mantissa_bits) << 23)
        } else {
            f32::from_bits(((exponent + 127 - bias) << 23) | (mantissa << (23 - mantissa_bits)))
        };
        numbers[byte as usize] = f32::from_bits(positive.to_bits() | sign);
        byte += 1;
    }
    numbers
}

const fn integers() -> [f32; 256] {
    let mut numbers = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        numbers[byte] = (byte as u8).cast_signed() as f32;
        byte += 1;
    }
    numbers
}

/// A power of two of 8 bits, E8M0: from 2^-127 to 2^127, and not a number.
pub fn e8m0(byte: u8) -> f32 {
    match byte {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(byte) << 23),
    }
}

/// Gives `each` the parts of `out` that lie in one span of so many elements each, and where they begin: `out` begins at `first`.
pub(super) fn runs(first: usize, out: &mut [f32], span: usize, mut each: impl FnMut(usize, &mut [f32])) {
    let (mut at, mut rest) = (first, out);
    while !rest.is_empty() {
        let (run, after) = rest.split_at_mut((span - at % span).min(rest.len()));
        each(at, &mut *run);
        at += run.len();
        rest = after;
    }
}

/// Numbers of 4 bits from the one with this index on: even ones are shifted right by `even` bits, odd ones by the other 4.
pub(super) fn pairs(data: &[u8], first: usize, out: &mut [f32], even: u32, numbers: &[f32; 16]) {
    let number = |byte: u8, shift: u32| numbers[usize::from(byte >> shift & 15)];
    let odd = 4 - even;
    let (head, rest) = out.split_at_mut((first % 2).min(out.len()));
    if let [head] = head {
        *head = number(data[first / 2], odd);
    }
    let mut pairs = rest.chunks_exact_mut(2);
    let mut bytes = data[first.div_ceil(2)..].iter();
    for (pair, &byte) in pairs.by_ref().zip(bytes.by_ref()) {
        pair[0] = number(byte, even);
        pair[1] = number(byte, odd);
    }
    if let ([last], Some(&byte)) = (pairs.into_remainder(), bytes.next()) {
        *last = number(byte, even);
    }
}

/// How the numbers of a scale, a zero point or a codebook are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub enum Number {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// The upper half of an f32.
    Bf16,
    /// FP8 with four bits of exponent.
    E4m3,
    /// FP8 with five bits of exponent.
    E5m2,
    /// A power of two.
    E8m0,
    /// A byte without a sign.
    U8,
    /// A byte with a sign.
    I8,
}

impl Number {
    /// The number type of a tensor, if it is one of these.
    pub fn of(kind: TensorType) -> Option<Self> {
        Some(match kind.to_string().as_str() {
            "F32" => Self::F32,
            "F16" => Self::F16,
            "BF16" => Self::Bf16,
            "F8_E4M3" => Self::E4m3,
            "F8_E5M2" => Self::E5m2,
            "F8_E8M0" => Self::E8m0,
            "U8" => Self::U8,
            "I8" => Self::I8,
            _ => return None,
        })
    }

    /// Whether it is one of the types that models compute in.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Bytes of one.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            _ => 1,
        }
    }

    /// The number at a place of a tensor's bytes. Zero behind their end, which sizes that were checked rule out.
    pub fn at(self, bytes: &[u8], index: usize) -> f32 {
        let start = index * self.bytes();
        let byte = |i: usize| bytes.get(start + i).copied().unwrap_or(0);
        match self {
            Self::F32 => f32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]),
            Self::F16 => f16::from_le_bytes([byte(0), byte(1)]).to_f32(),
            Self::Bf16 => bf16::from_le_bytes([byte(0), byte(1)]).to_f32(),
            Self::E4m3 => E4M3[usize::from(byte(0))],
            Self::E5m2 => E5M2[usize::from(byte(0))],
            Self::E8m0 => e8m0(byte(0)),
            Self::U8 => f32::from(byte(0)),
            Self::I8 => I8[usize::from(byte(0))],
        }
    }

    /// A number rounded to this type, if it is one that models compute in.
    pub fn round(self, number: f32) -> f32 {
        match self {
            Self::F16 => f16::from_f32(number).to_f32(),
            Self::Bf16 => bf16::from_f32(number).to_f32(),
            _ => number,
        }
    }
}

/// A part that holds so many numbers: its bytes, and their type.
pub(super) fn part_numbers<'a>(
    weight: &QuantWeight,
    role: PartRole,
    parts: &'a dyn Parts,
    count: u64,
) -> Result<(&'a [u8], Number)> {
    let part = weight.needs(role)?;
    let number = Number::of(part.kind).ok_or_else(|| QuantError::PartKind {
        layer: weight.name.clone(),
        tensor: part.tensor.clone(),
        have: part.kind.to_string(),
        need: "numbers".into(),
    })?;
    Ok((part_bytes(weight, part, parts, count.saturating_mul(number.bytes() as u64))?, number))
}
