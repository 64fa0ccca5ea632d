//! The K types: 256 elements with a half-precision scale, divided into groups with small integer scales of their own.

use super::scalar::{double_word, half, signed, take};

/// 16 bytes of scale and minimum nibbles, 64 bytes of two-bit numbers, d f16, dmin f16: d · scale · q − dmin · minimum.
pub(super) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, quants) = (take::<16>(block, 0), take::<64>(block, 16));
    let (d, d_min) = (half(block, 80), half(block, 82));
    for (index, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = d * f32::from(scales[index] & 15);
        let minimum = d_min * f32::from(scales[index] >> 4);
        let (at, shift) = two_bits(index);
        for (out, byte) in out.iter_mut().zip(take::<16>(&quants, at)) {
            *out = scale * f32::from(byte >> shift & 3) - minimum;
        }
    }
}

/// 32 bytes of high bits, 64 bytes of two-bit numbers, 12 bytes of six-bit scales, d f16: d · (scale − 32) · q, where q is
/// lower by 4 if its high bit is not set.
pub(super) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (high, quants, packed) = (take::<32>(block, 0), take::<64>(block, 32), take::<12>(block, 96));
    let d = half(block, 108);
    let (mut scales, mut numbers) = ([0.0; 16], [0; 256]);
    for (index, scale) in scales.iter_mut().enumerate() {
        let low = packed[index % 8] >> (4 * (index / 8)) & 15;
        let bits = low | (packed[8 + index % 4] >> (2 * (index / 4)) & 3) << 4;
        *scale = d * f32::from(bits.cast_signed() - 32);
    }
    for (index, row) in numbers.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let quants = take::<32>(&quants, 32 * (index / 4));
        for ((number, quant), high) in row.iter_mut().zip(quants).zip(high) {
            *number = (quant >> (2 * (index % 4)) & 3 | (high >> index & 1) << 2).wrapping_sub(4);
        }
    }
    scaled(&scales, &numbers, out);
}

/// Where the 16 two-bit numbers of a group lie in their 64 bytes: from which byte on, and how far to shift.
#[inline]
fn two_bits(group: usize) -> (usize, usize) {
    (32 * (group / 8) + 16 * (group % 2), 2 * (group / 2 % 4))
}

/// d f16, dmin f16, 12 bytes of six-bit scales and minima, 128 bytes of nibbles: d · scale · q − dmin · minimum.
pub(super) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (scales, minima) = scales_and_minima(block);
    let quants = take::<128>(block, 16);
    let (pairs, _) = out.as_chunks_mut::<64>();
    for (index, (out, quants)) in pairs.iter_mut().zip(quants.as_chunks::<32>().0).enumerate() {
        let (low, high) = out.split_at_mut(32);
        for ((low, high), byte) in low.iter_mut().zip(high).zip(quants) {
            *low = scales[2 * index] * f32::from(byte & 15) - minima[2 * index];
            *high = scales[2 * index + 1] * f32::from(byte >> 4) - minima[2 * index + 1];
        }
    }
}

/// d f16, dmin f16, 12 bytes of six-bit scales and minima, 32 bytes of fifth bits, 128 bytes of nibbles.
pub(super) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (scales, minima) = scales_and_minima(block);
    let (fifth, quants) = (take::<32>(block, 16), take::<128>(block, 48));
    let (pairs, _) = out.as_chunks_mut::<64>();
    for (index, (out, quants)) in pairs.iter_mut().zip(quants.as_chunks::<32>().0).enumerate() {
        let (low, high) = out.split_at_mut(32);
        for (((low, high), byte), fifth) in low.iter_mut().zip(high).zip(quants).zip(fifth) {
            let (first, second) = (fifth >> (2 * index) & 1, fifth >> (2 * index + 1) & 1);
            *low = scales[2 * index] * f32::from(byte & 15 | first << 4) - minima[2 * index];
            *high = scales[2 * index + 1] * f32::from(byte >> 4 | second << 4) - minima[2 * index + 1];
        }
    }
}

/// The scales and minima of eight groups. The low six bits of bytes 0..4 and 4..8 are those of the first four; of the others
/// the low nibbles are in bytes 8..12, and the high bits on top of the first four's.
#[inline]
fn scales_and_minima(block: &[u8]) -> ([f32; 8], [f32; 8]) {
    let (d, d_min, packed) = (half(block, 0), half(block, 2), take::<12>(block, 4));
    let (mut scales, mut minima) = ([0.0; 8], [0.0; 8]);
    for index in 0..4 {
        let (scale, minimum, low) = (packed[index], packed[index + 4], packed[index + 8]);
        scales[index] = d * f32::from(scale & 63);
        minima[index] = d_min * f32::from(minimum & 63);
        scales[index + 4] = d * f32::from(low & 15 | scale >> 2 & 0x30);
        minima[index + 4] = d_min * f32::from(low >> 4 | minimum >> 2 & 0x30);
    }
    (scales, minima)
}

/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, d f16: d · scale · (q − 32).
pub(super) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, high, scales) = (take::<128>(block, 0), take::<64>(block, 128), take::<16>(block, 192));
    let d = half(block, 208);
    let mut numbers = [0; 256];
    // Halves of 128 elements are four rows of 32: the low nibbles of 64 bytes, then their high ones.
    for (half, rows) in numbers.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let (low, high) = (take::<64>(&low, 64 * half), take::<32>(&high, 32 * half));
        for (index, row) in rows.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let low = take::<32>(&low, 32 * (index % 2));
            for ((number, low), high) in row.iter_mut().zip(low).zip(high) {
                let low = if index < 2 { low & 15 } else { low >> 4 };
                *number = (low | (high >> (2 * index) & 3) << 4).wrapping_sub(32);
            }
        }
    }
    scaled(&scales.map(|scale| d * signed(scale)), &numbers, out);
}

/// Signed bytes times the scale of their sixteen. A pass of its own over numbers in memory: what precedes it is done on
/// sixteen bytes at once, this on four numbers, and in one loop it would all be four.
#[inline]
fn scaled(scales: &[f32; 16], numbers: &[u8; 256], out: &mut [f32; 256]) {
    let groups = out.as_chunks_mut::<16>().0.iter_mut().zip(numbers.as_chunks::<16>().0);
    for ((out, numbers), scale) in groups.zip(scales) {
        for (out, number) in out.iter_mut().zip(numbers) {
            *out = scale * signed(*number);
        }
    }
}

/// d f32, 256 signed bytes, 16 sums of 16 numbers each, which are for products with other blocks.
pub(super) fn q8_k(block: &[u8; 292], out: &mut [f32; 256]) {
    let d = f32::from_bits(double_word(block, 0));
    for (out, quant) in out.iter_mut().zip(take::<256>(block, 4)) {
        *out = d * signed(quant);
    }
}
