//! Numbers in the bytes of a float tensor, and quanto's arithmetic on them, each step of which is rounded to the type of the weight.
//! Loops have no branches, and read a number's bytes as an array, which the compiler turns into vector code.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Elements of half precision that are converted at a time: 4 KiB as f32, which stay in the first-level cache.
const SCRATCH: usize = 1024;

/// A type that weights come in.
pub(super) trait Float: Sync {
    /// Bytes of a number.
    const BYTES: usize;

    /// The largest magnitude there is, and not a number if one of them is not.
    fn largest(bytes: &[u8]) -> f32;

    /// The smallest and the largest number, and not a number if one of them is not.
    fn extremes(bytes: &[u8]) -> [f32; 2];

    /// Each number divided by `factor`, and what `encode` makes of it.
    fn divided(bytes: &[u8], factor: f32, out: &mut [u8], encode: impl Fn(f32) -> u8 + Copy);

    /// Each number plus `shift`, divided by `factor`; `put` adds it to what is there.
    fn shifted(bytes: &[u8], shift: f32, factor: f32, out: &mut [u8], put: impl Fn(u8, f32) -> u8 + Copy);

    /// Rounds to this type.
    fn round(number: f32) -> f32;

    /// Whether a scale is a normal number of this type, so far from zero and infinity that no quotient of its row is out of f32's
    /// range, or not a number.
    #[inline(always)]
    fn is_usual(factor: f32) -> bool {
        (1e-30..=1e30).contains(&factor)
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

/// What the types of two bytes have alike.
macro_rules! of_two_bytes {
    ($number:ty) => {
        const BYTES: usize = 2;

        #[inline(always)]
        fn largest(bytes: &[u8]) -> f32 {
            <$number>::from_bits(largest(bytes)).to_f32()
        }

        #[inline(always)]
        fn extremes(bytes: &[u8]) -> [f32; 2] {
            numbers(extremes(bytes).map(|bits| <$number>::from_bits(bits).to_f32()))
        }

        #[inline(always)]
        fn round(number: f32) -> f32 {
            <$number>::from_f32(number).to_f32()
        }

        #[inline(always)]
        fn store(number: f32, out: &mut [u8]) {
            out.copy_from_slice(&<$number>::from_f32(number).to_le_bytes());
        }
    };
}

impl Float for Single {
    const BYTES: usize = 4;

    #[inline(always)]
    fn largest(bytes: &[u8]) -> f32 {
        // Positive numbers are ordered as integers, and what is not a number is beyond them all.
        let mut largest = 0;
        for bytes in bytes.as_chunks().0 {
            largest = largest.max(i32::from_le_bytes(*bytes) & i32::MAX);
        }
        f32::from_bits(largest.cast_unsigned())
    }

    #[inline(always)]
    fn extremes(bytes: &[u8]) -> [f32; 2] {
        // Negative ones are ordered the other way round.
        let ordered = |bits: i32| bits ^ (bits >> 31 & i32::MAX);
        let (mut low, mut high) = (i32::MAX, i32::MIN);
        for bytes in bytes.as_chunks().0 {
            let bits = ordered(i32::from_le_bytes(*bytes));
            low = low.min(bits);
            high = high.max(bits);
        }
        numbers([low, high].map(|bits| f32::from_bits(ordered(bits).cast_unsigned())))
    }

    #[inline(always)]
    fn divided(bytes: &[u8], factor: f32, out: &mut [u8], encode: impl Fn(f32) -> u8 + Copy) {
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *out = encode(f32::from_le_bytes(*bytes) / factor);
        }
    }

    #[inline(always)]
    fn shifted(bytes: &[u8], shift: f32, factor: f32, out: &mut [u8], put: impl Fn(u8, f32) -> u8 + Copy) {
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *out = put(*out, (f32::from_le_bytes(*bytes) + shift) / factor);
        }
    }

    #[inline(always)]
    fn round(number: f32) -> f32 {
        number
    }

    #[inline(always)]
    fn store(number: f32, out: &mut [u8]) {
        out.copy_from_slice(&number.to_le_bytes());
    }
}

impl Float for Brain {
    of_two_bytes!(bf16);

    #[inline(always)]
    fn divided(bytes: &[u8], factor: f32, out: &mut [u8], encode: impl Fn(f32) -> u8 + Copy) {
        if Self::is_usual(factor) {
            // A product with the inverse is off by 2^-23 of it at most. No quotient of two numbers of 8 bits is closer to the middle
            // between two of them than 2^-17 of it: so it rounds to the same, and takes less time.
            let inverse = 1.0 / factor;
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = encode(to_brain(brain(*bytes) * inverse));
            }
        } else {
            for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
                *out = encode(to_brain(brain(*bytes) / factor));
            }
        }
    }

    #[inline(always)]
    fn shifted(bytes: &[u8], shift: f32, factor: f32, out: &mut [u8], put: impl Fn(u8, f32) -> u8 + Copy) {
        for (out, bytes) in out.iter_mut().zip(bytes.as_chunks().0) {
            *out = put(*out, to_brain(to_brain(brain(*bytes) + shift) / factor));
        }
    }
}

impl Float for Half {
    of_two_bytes!(f16);

    #[inline(always)]
    fn divided(bytes: &[u8], factor: f32, out: &mut [u8], encode: impl Fn(f32) -> u8 + Copy) {
        in_scratch(bytes, out, |numbers, halves, out| {
            each(numbers, halves, |number| number / factor);
            for (out, number) in out.iter_mut().zip(numbers) {
                *out = encode(*number);
            }
        });
    }

    #[inline(always)]
    fn shifted(bytes: &[u8], shift: f32, factor: f32, out: &mut [u8], put: impl Fn(u8, f32) -> u8 + Copy) {
        in_scratch(bytes, out, |numbers, halves, out| {
            each(numbers, halves, |number| number + shift);
            each(numbers, halves, |number| number / factor);
            for (out, number) in out.iter_mut().zip(numbers) {
                *out = put(*out, *number);
            }
        });
    }

    #[inline(always)]
    fn is_usual(factor: f32) -> bool {
        (f16::MIN_POSITIVE.to_f32()..=f16::MAX.to_f32()).contains(&factor)
    }
}

/// A number of bf16.
#[inline(always)]
fn brain(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// Rounds to the nearest bf16, ties to even. What is not a number stays so: it comes of numbers of bf16, whose low bits are zero, so
/// that the addition cannot overflow.
#[inline(always)]
fn to_brain(number: f32) -> f32 {
    let bits = number.to_bits();
    f32::from_bits(bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000)
}

/// The bits of the largest magnitude of two bytes.
#[inline(always)]
fn largest(bytes: &[u8]) -> u16 {
    let mut largest = 0;
    for bytes in bytes.as_chunks().0 {
        largest = largest.max(i16::from_le_bytes(*bytes) & i16::MAX);
    }
    largest.cast_unsigned()
}

/// The bits of the smallest and the largest number of two bytes.
#[inline(always)]
fn extremes(bytes: &[u8]) -> [u16; 2] {
    let ordered = |bits: i16| bits ^ (bits >> 15 & i16::MAX);
    let (mut low, mut high) = (i16::MAX, i16::MIN);
    for bytes in bytes.as_chunks().0 {
        let bits = ordered(i16::from_le_bytes(*bytes));
        low = low.min(bits);
        high = high.max(bits);
    }
    [low, high].map(|bits| ordered(bits).cast_unsigned())
}

/// Both, or neither if one is not a number.
#[inline(always)]
fn numbers([low, high]: [f32; 2]) -> [f32; 2] {
    if low.is_nan() || high.is_nan() { [f32::NAN; 2] } else { [low, high] }
}

/// Gives numbers of half precision to `run` as f32, some at a time, with room to round them in.
#[inline(always)]
fn in_scratch(bytes: &[u8], out: &mut [u8], run: impl Fn(&mut [f32], &mut [f16], &mut [u8])) {
    let (mut numbers, mut halves) = ([0.0; SCRATCH], [f16::ZERO; SCRATCH]);
    for (bytes, out) in bytes.chunks(2 * SCRATCH).zip(out.chunks_mut(SCRATCH)) {
        let (numbers, halves) = (&mut numbers[..out.len()], &mut halves[..out.len()]);
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        halves.convert_to_f32_slice(numbers);
        run(numbers, halves, out);
    }
}

/// Changes each number, and rounds it to half precision.
#[inline(always)]
fn each(numbers: &mut [f32], halves: &mut [f16], change: impl Fn(f32) -> f32) {
    for number in &mut *numbers {
        *number = change(*number);
    }
    halves.convert_from_f32_slice(numbers);
    halves.convert_to_f32_slice(numbers);
}

#[cfg(test)]
mod tests {
    use super::{brain, to_brain};

    /// What the multiplication with the inverse relies on, tried for all mantissas.
    #[test]
    fn quotients_of_bf16_are_rounded_alike_by_the_inverse() {
        for factor in 0..0x80_u16 {
            let factor = brain((0x3f80 | factor).to_le_bytes());
            for mantissa in 0..0x80_u16 {
                let number = brain((0x4100 | mantissa).to_le_bytes());
                let inverse = 1.0 / factor;
                let [quotient, product] =
                    [number / factor, number * inverse].map(|exact| to_brain(exact).to_bits());
                assert_eq!(quotient, product, "{number} {factor}");
            }
        }
    }
}
