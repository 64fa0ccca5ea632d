//! The IQ types of one to three bits: 256 elements in groups with a scale; each four or eight neighbours are a vector of a
//! codebook, with signs.

use super::scalar::{double_word, from_half, half, take, word};
use super::tables::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS, SIGNS, even_signs};

/// Half of 1: small scales count halves.
const HALF: f32 = 0.5;

/// d f16; eight times four indexes (u8) and a word of four times seven signs and a scale.
pub(super) fn iq2_xxs(block: &[u8; 66], out: &mut [f32; 256]) {
    let d = half(block, 0);
    for (index, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (indexes, word) = (take::<4>(block, 2 + 8 * index), double_word(block, 6 + 8 * index));
        let scale = d * (HALF + small(word >> 28)) * 0.25;
        for (place, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            signed_vector(scale, IQ2_XXS[usize::from(indexes[place])], even_signs(word >> (7 * place)), out);
        }
    }
}

/// d f16, 32 words of an index (9 bits) and seven signs, 16 nibbles of scales.
pub(super) fn iq2_xs(block: &[u8; 74], out: &mut [f32; 256]) {
    let (d, scales) = (half(block, 0), take::<8>(block, 66));
    for (index, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = word(block, 2 + 2 * index);
        let scale = d * (HALF + nibble(&scales, index / 2)) * 0.25;
        signed_vector(scale, IQ2_XS[usize::from(word & 511)], even_signs(u32::from(word >> 9)), out);
    }
}

/// d f16, 32 low bytes of indexes, 32 bytes of signs, 8 bytes of pairs of high bits, 16 nibbles of scales.
pub(super) fn iq2_s(block: &[u8; 82], out: &mut [f32; 256]) {
    let (d, low, signs) = (half(block, 0), take::<32>(block, 2), take::<32>(block, 34));
    let (high, scales) = (take::<8>(block, 66), take::<8>(block, 74));
    for (index, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = usize::from(high[index / 4] >> (2 * (index % 4)) & 3);
        let scale = d * (HALF + nibble(&scales, index / 2)) * 0.25;
        let vector = IQ2_S[usize::from(low[index]) | high << 8];
        signed_vector(scale, vector, &SIGNS[usize::from(signs[index])], out);
    }
}

/// d f16, 64 indexes, eight words of four times seven signs and a scale.
pub(super) fn iq3_xxs(block: &[u8; 98], out: &mut [f32; 256]) {
    let (d, indexes) = (half(block, 0), take::<64>(block, 2));
    for (index, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = double_word(block, 66 + 4 * (index / 4));
        let scale = d * (HALF + small(word >> 28)) * HALF;
        let vector =
            joined(IQ3_XXS[usize::from(indexes[2 * index])], IQ3_XXS[usize::from(indexes[2 * index + 1])]);
        signed_vector(scale, vector, even_signs(word >> (7 * (index % 4))), out);
    }
}

/// d f16, 64 low bytes of indexes, 8 bytes of high bits, 32 bytes of signs, 8 nibbles of scales: d · (1 + 2 · scale).
pub(super) fn iq3_s(block: &[u8; 110], out: &mut [f32; 256]) {
    let (d, low, high) = (half(block, 0), take::<64>(block, 2), take::<8>(block, 66));
    let (signs, scales) = (take::<32>(block, 74), take::<4>(block, 106));
    for (index, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = d * (1.0 + 2.0 * nibble(&scales, index / 4));
        let high = usize::from(high[index / 4]) >> (2 * (index % 4));
        let vector = joined(
            IQ3_S[usize::from(low[2 * index]) | (high & 1) << 8],
            IQ3_S[usize::from(low[2 * index + 1]) | (high >> 1 & 1) << 8],
        );
        signed_vector(scale, vector, &SIGNS[usize::from(signs[index])], out);
    }
}

/// d f16, 32 low bytes of indexes, eight words of four times three high bits, a scale and the sign of the offset.
pub(super) fn iq1_s(block: &[u8; 50], out: &mut [f32; 256]) {
    let (d, low) = (half(block, 0), take::<32>(block, 2));
    for (index, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let word = word(block, 34 + 2 * (index / 4));
        let scale = d * (2.0 * f32::from(word >> 12 & 7) + 1.0);
        let high = usize::from(word >> (3 * (index % 4)) & 7);
        offset_vector(scale, usize::from(low[index]) | high << 8, word & 0x8000 != 0, out);
    }
}

/// 32 low bytes of indexes, 32 nibbles of three high bits and the sign of the offset, four words of four scales. Their high
/// nibbles together are d f16.
pub(super) fn iq1_m(block: &[u8; 56], out: &mut [f32; 256]) {
    let (low, high) = (take::<32>(block, 0), take::<16>(block, 32));
    let words = [0, 1, 2, 3].map(|index| word(block, 48 + 2 * index));
    let d = from_half(words[0] >> 12 | words[1] >> 12 << 4 | words[2] >> 12 << 8 | words[3] >> 12 << 12);
    for (index, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let scale = words[index / 8] >> (3 * (index / 2 % 4)) & 7;
        let scale = d * (2.0 * f32::from(scale) + 1.0);
        let high = high[index / 2] >> (4 * (index % 2)) & 15;
        offset_vector(scale, usize::from(low[index]) | usize::from(high & 7) << 8, high & 8 != 0, out);
    }
}

/// scale · value, with signs.
#[inline]
fn signed_vector(scale: f32, vector: [i8; 8], signs: &[u32; 8], out: &mut [f32; 8]) {
    for ((out, value), sign) in out.iter_mut().zip(vector).zip(signs) {
        *out = f32::from_bits((scale * f32::from(value)).to_bits() ^ sign);
    }
}

/// scale · (value ± 1/8).
#[inline]
fn offset_vector(scale: f32, index: usize, minus: bool, out: &mut [f32; 8]) {
    let offset = if minus { -0.125 } else { 0.125 };
    for (out, value) in out.iter_mut().zip(&IQ1[index]) {
        *out = scale * (f32::from(*value) + offset);
    }
}

/// Two vectors of four as one of eight.
#[inline]
fn joined(first: [i8; 4], second: [i8; 4]) -> [i8; 8] {
    let mut vector = [0; 8];
    vector[..4].copy_from_slice(&first);
    vector[4..].copy_from_slice(&second);
    vector
}

/// The nibble with this number, low ones first.
#[inline]
fn nibble(bytes: &[u8], index: usize) -> f32 {
    f32::from(bytes[index / 2] >> (4 * (index % 2)) & 15)
}

/// A number of four bits.
#[inline]
fn small(number: u32) -> f32 {
    f32::from(number as u8)
}
