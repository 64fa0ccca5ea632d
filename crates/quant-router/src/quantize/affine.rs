//! Types below a byte: a group's numbers from the smallest to the largest are 0 to the largest code.
//!
//! ```text
//! scale = (largest − smallest) ÷ codes       shift = −smallest       code = (number + shift) ÷ scale
//! ```

use std::marker::PhantomData;

use super::encode::unsigned;
use super::source::Float;
use crate::widest::Loop;

/// Scale and shift of some whole groups, which fill both.
pub(super) struct Ranges<'a, F> {
    pub(super) bits: u32,
    pub(super) group: usize,
    pub(super) from: &'a [u8],
    pub(super) scale: &'a mut [u8],
    pub(super) shift: &'a mut [u8],
    pub(super) float: PhantomData<F>,
}

impl<F: Float> Loop for Ranges<'_, F> {
    #[inline(always)]
    fn run(self) {
        let groups = self.from.chunks_exact(self.group * F::BYTES).zip(self.scale.chunks_exact_mut(F::BYTES));
        for ((from, scale), shift) in groups.zip(self.shift.chunks_exact_mut(F::BYTES)) {
            let [low, high] = F::extremes(from);
            F::store(F::round(F::round(high - low) / largest(self.bits)), scale);
            F::store(-low, shift);
        }
    }
}

/// Codes of a group, into the bits of their bytes from `bit` on.
pub(super) struct Codes<'a, F> {
    pub(super) bits: u32,
    pub(super) bit: u32,
    pub(super) from: &'a [u8],
    /// Scale and shift.
    pub(super) range: [f32; 2],
    pub(super) data: &'a mut [u8],
    pub(super) float: PhantomData<F>,
}

impl<F: Float> Loop for Codes<'_, F> {
    #[inline(always)]
    fn run(self) {
        let (largest, mask, bit) = (largest(self.bits), others(self.bits, self.bit), self.bit);
        let [scale, shift] = self.range;
        let put = |byte, number| byte & mask | unsigned(number, largest) << bit;
        F::shifted(self.from, shift, scale, self.data, put);
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
