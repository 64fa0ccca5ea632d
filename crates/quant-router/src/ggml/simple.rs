//! Types whose block is a scale, perhaps a minimum, and the numbers: w = d · q, or d · q + m.

use super::scalar::{double_word, half, signed, take};

/// d f16, 16 bytes of nibbles.
pub(super) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let (d, quants) = (half(block, 0), take::<16>(block, 2));
    let (low, high) = out.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(quants) {
        *low = d * f32::from((byte & 15).cast_signed() - 8);
        *high = d * f32::from((byte >> 4).cast_signed() - 8);
    }
}

/// d f16, m f16, 16 bytes of nibbles.
pub(super) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m, quants) = (half(block, 0), half(block, 2), take::<16>(block, 4));
    let (low, high) = out.split_at_mut(16);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(quants) {
        *low = d * f32::from(byte & 15) + m;
        *high = d * f32::from(byte >> 4) + m;
    }
}

/// d f16, 4 bytes of fifth bits, 16 bytes of nibbles.
pub(super) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half(block, 0);
    let quants = five_bits(double_word(block, 2), &take(block, 6));
    for (out, quant) in out.iter_mut().zip(quants) {
        *out = d * f32::from(quant.cast_signed() - 16);
    }
}

/// d f16, m f16, 4 bytes of fifth bits, 16 bytes of nibbles.
pub(super) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half(block, 0), half(block, 2));
    let quants = five_bits(double_word(block, 4), &take(block, 8));
    for (out, quant) in out.iter_mut().zip(quants) {
        *out = d * f32::from(quant) + m;
    }
}

/// Nibbles with a fifth bit each.
#[inline]
fn five_bits(fifth: u32, nibbles: &[u8; 16]) -> [u8; 32] {
    let mut quants = [0; 32];
    for (index, byte) in nibbles.iter().enumerate() {
        quants[index] = byte & 15 | ((fifth >> index & 1) << 4) as u8;
        quants[index + 16] = byte >> 4 | ((fifth >> (index + 16) & 1) << 4) as u8;
    }
    quants
}

/// d f16, 32 signed bytes.
pub(super) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let (d, quants) = (half(block, 0), take::<32>(block, 2));
    for (out, quant) in out.iter_mut().zip(quants) {
        *out = signed(quant) * d;
    }
}

/// d f16, d · (sum of the numbers) f16, 32 signed bytes. The sum is for products with other blocks.
pub(super) fn q8_1(block: &[u8; 36], out: &mut [f32; 32]) {
    let (d, quants) = (half(block, 0), take::<32>(block, 4));
    for (out, quant) in out.iter_mut().zip(quants) {
        *out = signed(quant) * d;
    }
}

/// d f16, 16 bytes of signs: d where the bit is set, else −d.
pub(super) fn q1_0(block: &[u8; 18], out: &mut [f32; 128]) {
    let (d, bits) = (half(block, 0), take::<16>(block, 2));
    for (out, byte) in out.as_chunks_mut::<8>().0.iter_mut().zip(bits) {
        for (index, out) in out.iter_mut().enumerate() {
            *out = if byte >> index & 1 == 1 { d } else { -d };
        }
    }
}

/// d f16, 16 bytes of two-bit numbers, four neighbours a byte: d · (q − 1).
pub(super) fn q2_0(block: &[u8; 18], out: &mut [f32; 64]) {
    let (d, quants) = (half(block, 0), take::<16>(block, 2));
    for (out, byte) in out.as_chunks_mut::<4>().0.iter_mut().zip(quants) {
        for (index, out) in out.iter_mut().enumerate() {
            *out = f32::from((byte >> (2 * index) & 3).cast_signed() - 1) * d;
        }
    }
}
