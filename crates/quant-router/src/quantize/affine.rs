//! Types below a byte: a group's numbers from the smallest to the largest are 0 to the largest code.
//!
//! ```text
//! scale = (largest − smallest) ÷ codes       shift = −smallest       code = (number + shift) ÷ scale
//! ```

use super::encode::unsigned;
use super::source::Float;

/// Scale and shift of some whole groups, which fill both.
pub(super) fn ranges<F: Float>(bits: u32, group: usize, from: &[u8], scale: &mut [u8], shift: &mut [u8]) {
    let groups = from.chunks_exact(group * F::BYTES).zip(scale.chunks_exact_mut(F::BYTES));
    for ((from, scale), shift) in groups.zip(shift.chunks_exact_mut(F::BYTES)) {
        let [low, high] = F::extremes(from);
        F::store(F::round(F::round(high - low) / largest(bits)), scale);
        F::store(-low, shift);
    }
}

/// Puts the codes of a group into the bits of their bytes from `bit` on.
pub(super) fn codes<F: Float>(bits: u32, bit: u32, from: &[u8], [scale, shift]: [f32; 2], data: &mut [u8]) {
    let largest = largest(bits);
    let mask = others(bits, bit);
    F::shifted(from, shift, scale, data, |byte, number| byte & mask | unsigned(number, largest) << bit);
}

/// Clears the bits that no group has.
pub(super) fn clear(bits: u32, bit: u32, data: &mut [u8]) {
    let mask = others(bits, bit);
    for byte in data {
        *byte &= mask;
    }
}

/// The bits of a byte that belong to other groups.
fn others(bits: u32, bit: u32) -> u8 {
    !(((1 << bits) - 1) << bit)
}

/// The largest code.
fn largest(bits: u32) -> f32 {
    if bits == 2 { 3.0 } else { 15.0 }
}
