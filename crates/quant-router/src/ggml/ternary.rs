//! Types whose numbers are −1, 0 or 1.

use super::scalar::{half, take};

/// 48 bytes of five base-3 digits each, 4 bytes of four, d f16: d · (digit − 1).
///
/// A byte is the number of its digits in 256ths of 3^5; multiplied by a power of 3 modulo 256, the next digit is on top.
pub(super) fn tq1_0(block: &[u8; 54], out: &mut [f32; 256]) {
    const POWERS: [u8; 5] = [1, 3, 9, 27, 81];
    let (first, second, last) = (take::<32>(block, 0), take::<16>(block, 32), take::<4>(block, 48));
    let d = half(block, 52);
    let (firsts, rest) = out.split_at_mut(32 * 5);
    let (seconds, lasts) = rest.split_at_mut(16 * 5);
    for (out, power) in firsts.as_chunks_mut::<32>().0.iter_mut().zip(POWERS) {
        digits(d, power, &first, out);
    }
    for (out, power) in seconds.as_chunks_mut::<16>().0.iter_mut().zip(POWERS) {
        digits(d, power, &second, out);
    }
    for (out, power) in lasts.as_chunks_mut::<4>().0.iter_mut().zip(POWERS) {
        digits(d, power, &last, out);
    }
}

/// One digit of each byte.
#[inline]
fn digits<const N: usize>(d: f32, power: u8, bytes: &[u8; N], out: &mut [f32; N]) {
    for (out, byte) in out.iter_mut().zip(bytes) {
        let digit = (u16::from(byte.wrapping_mul(power)) * 3) >> 8;
        *out = d * f32::from(digit.cast_signed() - 1);
    }
}

/// 64 bytes of two-bit numbers, d f16: d · (q − 1). 32 bytes hold four rows of 32.
pub(super) fn tq2_0(block: &[u8; 66], out: &mut [f32; 256]) {
    let (quants, d) = (take::<64>(block, 0), half(block, 64));
    for (index, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (out, byte) in out.iter_mut().zip(take::<32>(&quants, 32 * (index / 4))) {
            *out = d * f32::from((byte >> (2 * (index % 4)) & 3).cast_signed() - 1);
        }
    }
}
