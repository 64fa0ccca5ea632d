//! Numbers in the bytes of a float tensor, and rounding to its type: each step of quanto's arithmetic is rounded to the type of the
//! weight. Without branches, which the compiler turns into vector code.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements that are worked on at a time: 4 KiB of f32, which stay in the first-level cache with what is made of them.
pub(super) const SCRATCH: usize = 1024;

/// A type that weights come in.
pub(super) trait Float: Sync {
    /// Bytes of a number.
    const BYTES: usize;

    /// The largest magnitude there is, and not a number if one of them is not.
    fn largest(bytes: &[u8]) -> f32;

    /// Some numbers, at most [`SCRATCH`].
    fn load(bytes: &[u8], out: &mut [f32]);

    /// Rounds numbers to this type, ties to even.
    fn round_all(numbers: &mut [f32]);

    /// Rounds one.
    fn round(number: f32) -> f32 {
        let mut one = [number];
        Self::round_all(&mut one);
        one[0]
    }

    /// Writes a number of this type.
    fn store(number: f32, out: &mut [u8]);
}

/// Single precision.
pub(super) struct Single;
/// The upper half of it.
pub(super) struct Brain;
/// Half precision.
pub(super) struct Half;

/// The larger number, and not a number if one of them is not.
fn larger(one: f32, other: f32) -> f32 {
    if one > other || one.is_nan() { one } else { other }
}

/// Rounds to the nearest bf16, ties to even.
fn to_brain(number: f32) -> f32 {
    let bits = number.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000;
    // A NaN may only overflow here by its low bits, so that it is taken as it is.
    f32::from_bits(if number.is_nan() { bits } else { rounded })
}

impl Float for Single {
    const BYTES: usize = 4;

    fn largest(bytes: &[u8]) -> f32 {
        // Positive numbers are ordered as integers, and what is not a number is beyond them all.
        let bits = |bytes: &[u8]| i32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) & i32::MAX;
        f32::from_bits(bytes.chunks_exact(4).map(bits).fold(0, i32::max).cast_unsigned())
    }

    fn load(bytes: &[u8], out: &mut [f32]) {
        for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
            *out = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
    }

    fn round_all(_: &mut [f32]) {}

    fn store(number: f32, out: &mut [u8]) {
        out.copy_from_slice(&number.to_le_bytes());
    }
}

impl Float for Brain {
    const BYTES: usize = 2;

    fn largest(bytes: &[u8]) -> f32 {
        let bits = |bytes: &[u8]| i16::from_le_bytes([bytes[0], bytes[1]]) & i16::MAX;
        let largest = bytes.chunks_exact(2).map(bits).fold(0, i16::max);
        bf16::from_bits(largest.cast_unsigned()).to_f32()
    }

    fn load(bytes: &[u8], out: &mut [f32]) {
        for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(2)) {
            *out = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
        }
    }

    fn round_all(numbers: &mut [f32]) {
        for number in numbers {
            *number = to_brain(*number);
        }
    }

    fn store(number: f32, out: &mut [u8]) {
        out.copy_from_slice(&bf16::from_f32(number).to_le_bytes());
    }
}

impl Float for Half {
    const BYTES: usize = 2;

    fn largest(bytes: &[u8]) -> f32 {
        let bits = |bytes: &[u8]| i16::from_le_bytes([bytes[0], bytes[1]]) & i16::MAX;
        let largest = bytes.chunks_exact(2).map(bits).fold(0, i16::max);
        f16::from_bits(largest.cast_unsigned()).to_f32()
    }

    fn load(bytes: &[u8], out: &mut [f32]) {
        let mut halves = [f16::ZERO; SCRATCH];
        let halves = &mut halves[..out.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.chunks_exact(2)) {
            *half = f16::from_le_bytes([bytes[0], bytes[1]]);
        }
        halves.convert_to_f32_slice(out);
    }

    fn round_all(numbers: &mut [f32]) {
        let mut halves = [f16::ZERO; SCRATCH];
        let halves = &mut halves[..numbers.len()];
        halves.convert_from_f32_slice(numbers);
        halves.convert_to_f32_slice(numbers);
    }

    fn store(number: f32, out: &mut [u8]) {
        out.copy_from_slice(&f16::from_f32(number).to_le_bytes());
    }
}

/// The smallest and the largest of some numbers, and not a number if one of them is not.
pub(super) fn extremes<F: Float>(bytes: &[u8]) -> [f32; 2] {
    let mut scratch = [0.0; SCRATCH];
    let (mut low, mut high) = (f32::INFINITY, f32::NEG_INFINITY);
    for bytes in bytes.chunks(SCRATCH * F::BYTES) {
        let numbers = &mut scratch[..bytes.len() / F::BYTES];
        F::load(bytes, numbers);
        for &number in &*numbers {
            low = -larger(-low, -number);
            high = larger(high, number);
        }
    }
    [low, high]
}
