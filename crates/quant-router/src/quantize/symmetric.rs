//! Types of a byte: a row is divided by its scale, which makes its largest magnitude the type's largest number.

use std::marker::PhantomData;

use super::QuantKind;
use super::encode::{e4m3, e5m2, int8, usual_int8};
use super::source::Float;
use crate::widest::Loop;

/// Rows whose largest numbers are looked for together: a processor fetches several runs of memory ahead, each up to the end of
/// its page, so that four rows side by side arrive 1.4 times as fast as one after the other. They stay in the second-level cache.
const SIDE_BY_SIDE: usize = 4;
/// Bytes of a row that are looked at before those of the next.
const STRIP: usize = 512;

/// Some whole rows: their packed numbers and their scales, which fill `data` and `scale`.
pub(super) struct Rows<'a, F> {
    pub(super) kind: QuantKind,
    pub(super) columns: usize,
    pub(super) from: &'a [u8],
    pub(super) data: &'a mut [u8],
    pub(super) scale: &'a mut [u8],
    pub(super) float: PhantomData<F>,
}

impl<F: Float> Loop for Rows<'_, F> {
    #[inline(always)]
    fn run(self) {
        let Self { kind, columns, from, data, scale, .. } = self;
        let bytes = columns * F::BYTES;
        let rows = from.len() / bytes;
        for first in (0..rows).step_by(SIDE_BY_SIDE) {
            let several = SIDE_BY_SIDE.min(rows - first);
            let mut largest = [0; SIDE_BY_SIDE];
            for strip in (0..bytes).step_by(STRIP) {
                let length = STRIP.min(bytes - strip);
                for row in 0..several {
                    largest[row] =
                        peak::<F>(&from[(first + row) * bytes + strip..][..length]).max(largest[row]);
                }
            }
            for (row, largest) in (first..).zip(largest).take(several) {
                let factor = F::round(f32::from_bits(largest) / kind.limit());
                F::store(factor, &mut scale[row * F::BYTES..][..F::BYTES]);
                let (from, data) = (&from[row * bytes..][..bytes], &mut data[row * columns..][..columns]);
                match kind {
                    QuantKind::QFloat8E4m3 => F::divided(from, factor, data, e4m3),
                    QuantKind::QFloat8E5m2 => F::divided(from, factor, data, e5m2),
                    // A normal scale is rounded by 1/256 of it at most, so that no quotient is below -128.
                    _ if F::is_usual(factor) => F::divided(from, factor, data, usual_int8),
                    _ => F::divided(from, factor, data, int8),
                }
            }
        }
    }
}

/// The bits of the largest magnitude, which are ordered as numbers are, and what is not a number is beyond them all.
#[inline(always)]
fn peak<F: Float>(bytes: &[u8]) -> u32 {
    F::largest(bytes).to_bits()
}

#[cfg(test)]
mod tests {
    use std::marker::PhantomData;

    use super::super::affine::{Codes, Ranges};
    use super::super::source::{Brain, Float, Half, Single};
    use super::{QuantKind, Rows};
    use crate::widest::tests::Way;

    /// Rows of small numbers, of any bits, and of usual numbers.
    fn source<F: Float>(rows: usize, columns: usize) -> Vec<u8> {
        let mut state = 7_u64;
        let mut bytes = vec![0; rows * columns * F::BYTES];
        for (at, place) in bytes.chunks_exact_mut(F::BYTES).enumerate() {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            let number = (state >> 40) as f32 / 4096.0 - 2048.0;
            match at / columns % 4 {
                0 => F::store(F::round(number * 1e-6), place),
                1 => place.copy_from_slice(&state.to_le_bytes()[8 - F::BYTES..]),
                _ => F::store(F::round(number), place),
            }
        }
        bytes
    }

    fn alike<F: Float>() {
        for (rows, columns) in [(9, 33), (5, 1), (2, 700)] {
            let from = &source::<F>(rows, columns)[..];
            for kind in QuantKind::ALL {
                let float = PhantomData::<F>;
                let made = |way: &Way| {
                    let (mut data, mut scale) = (vec![0; rows * columns], vec![0; rows * F::BYTES]);
                    let mut shift = scale.clone();
                    let ran = if kind.bits() == 8 {
                        way.run(Rows { kind, columns, from, data: &mut data, scale: &mut scale, float })
                    } else {
                        let (bits, group, range) = (kind.bits(), columns, [300.0, 2000.0]);
                        let (scale, shift, data) = (&mut scale[..], &mut shift[..], &mut data[..]);
                        way.run(Ranges { bits, group, from, scale, shift, float })
                            && way.run(Codes { bits, bit: bits, from, range, data, float })
                    };
                    ran.then_some((data, scale, shift))
                };
                let all: Vec<_> = Way::ALL.iter().filter_map(made).collect();
                assert!(all.len() >= 2 && all.windows(2).all(|pair| pair[0] == pair[1]), "{kind} {rows}");
            }
        }
    }

    #[test]
    fn all_vectors_give_the_same_bits() {
        alike::<Single>();
        alike::<Brain>();
        alike::<Half>();
    }
}
