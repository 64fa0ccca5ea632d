//! Quotients as packed numbers: each as PyTorch converts it, saturated at the largest that the type has. Without branches, as
//! `source` is.

/// Plus this, a number of less than 2^22 is rounded to an integer, ties to even, which the low bits then hold.
const ROUND: f32 = 12_582_912.0;

/// A byte with a sign. What is not a number is 0.
#[inline(always)]
pub(super) fn int8(number: f32) -> u8 {
    ((bounded(number, -128.0, 127.0) + ROUND).to_bits()) as u8
}

/// A byte with a sign, of a number from -128 on that is one.
#[inline(always)]
pub(super) fn usual_int8(number: f32) -> u8 {
    let number = if number < 127.0 { number } else { 127.0 };
    ((number + ROUND).to_bits()) as u8
}

/// A number of so many bits without a sign. What is not a number is 0.
#[inline(always)]
pub(super) fn unsigned(number: f32, largest: f32) -> u8 {
    ((bounded(number, 0.0, largest) + ROUND).to_bits()) as u8
}

#[inline(always)]
fn bounded(number: f32, low: f32, high: f32) -> f32 {
    let number = if number.is_nan() { 0.0 } else { number };
    let number = if number > low { number } else { low };
    if number < high { number } else { high }
}

/// FP8 with four bits of exponent, rounded to the nearest, ties to even.
#[inline(always)]
pub(super) fn e4m3(number: f32) -> u8 {
    small::<3, 7>(number, 448.0)
}

/// FP8 with five bits of exponent, likewise.
#[inline(always)]
pub(super) fn e5m2(number: f32) -> u8 {
    small::<2, 15>(number, 57344.0)
}

/// A sign, an exponent with this bias, and so many bits of mantissa, of a number that is cut at the largest.
#[inline(always)]
fn small<const MANTISSA: u32, const BIAS: u32>(number: f32, largest: f32) -> u8 {
    let magnitude = f32::from_bits(number.to_bits() & 0x7fff_ffff);
    let magnitude = if magnitude > largest { largest } else { magnitude };
    let bits = magnitude.to_bits();
    let cut = 23 - MANTISSA;
    // Above the smallest normal number: the exponent is shifted, and what is cut off rounded by an addition that may carry into it.
    let shifted =
        bits.wrapping_sub((127 - BIAS) << 23).wrapping_add((1 << (cut - 1)) - 1 + (bits >> cut & 1));
    // Below it numbers are multiples of the smallest one, and adding a power of two leaves just those bits.
    let power = f32::from_bits((127 - BIAS + cut + 1) << 23);
    let subnormal = (magnitude + power).to_bits().wrapping_sub(power.to_bits());
    let normal = bits >= (128 - BIAS) << 23;
    let code = if normal { shifted >> cut } else { subnormal };
    let code = if number.is_nan() { 0x7f } else { code };
    (code | number.to_bits() >> 24 & 0x80) as u8
}

#[cfg(test)]
mod tests {
    use super::{e4m3, e5m2, int8, unsigned, usual_int8};
    use crate::formats::numbers::{E4M3, E5M2};

    /// The code whose number is nearest, the even one of two; by trying all.
    #[expect(clippy::float_cmp, reason = "a tie is one exactly")]
    fn nearest(table: &[f32; 256], number: f32) -> u8 {
        let mut best = 0;
        for code in 0..=0x7f_u8 {
            let (this, that) = (table[usize::from(code)], table[usize::from(best)]);
            if !this.is_finite() {
                continue;
            }
            let distance = |to: f32| (f64::from(number.abs()) - f64::from(to)).abs();
            if distance(this) < distance(that) || distance(this) == distance(that) && code % 2 == 0 {
                best = code;
            }
        }
        best | if number.is_sign_negative() { 0x80 } else { 0 }
    }

    #[test]
    fn numbers_of_a_byte_are_the_nearest() {
        for exponent in -30..=30 {
            for step in 0..=320_u16 {
                for sign in [1.0, -1.0] {
                    let number = sign * 2.0_f32.powi(exponent) * (1.0 + f32::from(step) / 320.0);
                    assert_eq!(e4m3(number), nearest(&E4M3, number), "{number}");
                    assert_eq!(e5m2(number), nearest(&E5M2, number), "{number}");
                }
            }
        }
        // Those that there are, and those half-way between two of them.
        for (table, encode) in [(&E4M3, e4m3 as fn(f32) -> u8), (&E5M2, e5m2)] {
            let finite: Vec<f32> = table[..128].iter().copied().filter(|number| number.is_finite()).collect();
            for pair in finite.windows(2) {
                assert_eq!(encode(pair[0]), nearest(table, pair[0]));
                let between = f32::midpoint(pair[0], pair[1]);
                assert_eq!(encode(between), nearest(table, between));
            }
        }
        for encode in [e4m3, e5m2] {
            assert_eq!((encode(f32::NAN) & 0x7f, encode(0.0), encode(-0.0)), (0x7f, 0, 0x80));
        }
        assert_eq!((e4m3(f32::INFINITY), e4m3(-1e30)), (0x7e, 0xfe));
        assert_eq!((e5m2(f32::INFINITY), e5m2(-1e30)), (0x7b, 0xfb));
    }

    #[test]
    fn integers_are_rounded_to_even_and_saturate() {
        let cases = [
            (0.5, 0),
            (1.5, 2),
            (-0.5, 0),
            (-1.5, -2),
            (126.5, 126),
            (127.4, 127),
            (1e30, 127),
            (-127.5, -128),
        ];
        for (number, expected) in cases {
            assert_eq!(int8(number).cast_signed(), expected, "{number}");
            assert!(number > 128.0 || usual_int8(number).cast_signed() == expected, "{number}");
        }
        assert_eq!((int8(f32::NAN), int8(f32::NEG_INFINITY)), (0, 0x80));
        let unsigned = [-1.0, 0.5, 2.5, 3.6, f32::INFINITY, f32::NAN].map(|number| unsigned(number, 3.0));
        assert_eq!(unsigned, [0, 0, 2, 3, 3, 0]);
    }
}
