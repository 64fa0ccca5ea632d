//! Types whose four-bit numbers are looked up: a table of 16 values, multiplied once by the scale of a group.

use super::scalar::{half, take, word};
use super::tables::{E2M1_DOUBLED, NON_LINEAR};

/// d f16, 16 bytes of nibbles.
pub(super) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    looked_up(half(block, 0), &NON_LINEAR, &take::<16>(block, 2), out);
}

/// d f16, 2 bytes of high bits of scales, 4 bytes of low nibbles of scales, 128 bytes of nibbles: d · (scale − 32) · value.
pub(super) fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let (d, high, low) = (half(block, 0), word(block, 2), take::<4>(block, 4));
    for (index, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let scale = low[index / 2] >> (4 * (index % 2)) & 15 | ((high >> (2 * index) & 3) << 4) as u8;
        let scale = d * f32::from(scale.cast_signed() - 32);
        looked_up(scale, &NON_LINEAR, &take::<16>(block, 8 + 16 * index), out);
    }
}

/// An exponent (E8M0), 16 bytes of nibbles (E2M1).
pub(super) fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let exponent = u32::from(block[0]);
    // Half of 2^(exponent − 127), since the table holds doubled values; the two lowest are subnormal.
    let scale = if exponent < 2 { 0x0020_0000 << exponent } else { (exponent - 1) << 23 };
    looked_up(f32::from_bits(scale), &E2M1_DOUBLED, &take::<16>(block, 1), out);
}

/// Four scales (E4M3, without sign), four times 8 bytes of nibbles (E2M1).
pub(super) fn nvfp4(block: &[u8; 36], out: &mut [f32; 64]) {
    for (index, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let scale = half_of_e4m3(block[index]);
        looked_up(scale, &E2M1_DOUBLED, &take::<8>(block, 4 + 8 * index), out);
    }
}

/// Low nibbles, then high ones, as values of a table times a scale.
#[inline]
fn looked_up<const BYTES: usize, const ELEMENTS: usize>(
    scale: f32,
    table: &[i8; 16],
    nibbles: &[u8; BYTES],
    out: &mut [f32; ELEMENTS],
) {
    let values = table.map(|value| scale * f32::from(value));
    let (low, high) = out.split_at_mut(BYTES);
    for ((low, high), byte) in low.iter_mut().zip(high).zip(nibbles) {
        *low = values[usize::from(byte & 15)];
        *high = values[usize::from(byte >> 4)];
    }
}

/// Half of an eight-bit float of four exponent and three fraction bits. The sign is not looked at, and NaN is 0: as ggml
/// reads scales.
#[inline]
fn half_of_e4m3(byte: u8) -> f32 {
    let (exponent, fraction) = (u32::from(byte >> 3 & 15), u32::from(byte & 7));
    if byte == 0x7f {
        0.0
    } else if exponent == 0 {
        // Fractions of 2^-6 in eighths, halved.
        f32::from(byte & 7) * f32::from_bits((127 - 10) << 23)
    } else {
        f32::from_bits((exponent + 127 - 7 - 1) << 23 | fraction << 20)
    }
}
