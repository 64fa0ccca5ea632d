//! Types below a byte: a group's numbers from the smallest to the largest are 0 to the largest code.
//!
//! ```text
//! scale = (largest − smallest) ÷ codes       shift = −smallest       code = (number + shift) ÷ scale
//! ```

use super::encode::unsigned;
use super::source::{Float, SCRATCH, extremes};

/// Scale and shift of some whole groups, which fill both.
pub(super) fn ranges<F: Float>(bits: u32, group: usize, from: &[u8], scale: &mut [u8], shift: &mut [u8]) {
    let groups = from.chunks_exact(group * F::BYTES).zip(scale.chunks_exact_mut(F::BYTES));
    for ((from, scale), shift) in groups.zip(shift.chunks_exact_mut(F::BYTES)) {
        let [low, high] = extremes::<F>(from);
        F::store(F::round(F::round(high - low) / largest(bits)), scale);
        F::store(-low, shift);
    }
}

/// Puts the codes of a group, or of its begin, into the bits of their bytes from `bit` on.
pub(super) fn codes<F: Float>(bits: u32, bit: u32, from: &[u8], [scale, shift]: [f32; 2], data: &mut [u8]) {
    let largest = largest(bits);
    let mask = others(bits, bit);
    let mut scratch = [0.0; SCRATCH];
    for (from, data) in from.chunks(SCRATCH * F::BYTES).zip(data.chunks_mut(SCRATCH)) {
        let numbers = &mut scratch[..data.len()];
        F::load(from, numbers);
        for number in &mut *numbers {
            *number += shift;
        }
        F::round_all(numbers);
        for number in &mut *numbers {
            *number /= scale;
        }
        F::round_all(numbers);
        for (data, number) in data.iter_mut().zip(numbers) {
            *data = *data & mask | unsigned(*number, largest) << bit;
        }
    }
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
