//! Numbers inside blocks: little-endian integers, half-precision scales, and the tables of four-bit floats.

/// Some bytes of a block. The bounds are constants wherever it is used, and compile to nothing.
#[inline]
pub(super) fn take<const N: usize>(block: &[u8], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&block[at..at + N]);
    bytes
}

/// The half-precision number at this byte.
///
/// Without the processor's own conversion, which takes a call that cannot be inlined: shifted into place, a half reads as
/// an f32 that is smaller by 2^112, subnormal or not, and the multiplication is exact.
#[inline]
pub(super) fn half(block: &[u8], at: usize) -> f32 {
    from_half(word(block, at))
}

/// A half-precision number from its bits.
#[inline]
pub(super) fn from_half(bits: u16) -> f32 {
    let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff) << 13);
    // Infinities and NaN keep their bits, and get the exponent of an f32.
    let magnitude = if rest >= 0x7c00 << 13 {
        rest | 0x7f80_0000
    } else {
        (f32::from_bits(rest) * f32::from_bits((127 + 112) << 23)).to_bits()
    };
    f32::from_bits(sign | magnitude)
}

/// The 16-bit number at this byte.
#[inline]
pub(super) fn word(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(take(block, at))
}

/// The 32-bit number at this byte.
#[inline]
pub(super) fn double_word(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(take(block, at))
}

/// A byte as the signed number it is.
#[inline]
pub(super) fn signed(byte: u8) -> f32 {
    f32::from(byte.cast_signed())
}

#[cfg(test)]
mod tests {
    use half::f16;

    #[test]
    fn halves_are_what_they_are() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (super::from_half(bits), f16::from_bits(bits).to_f32());
            assert!(ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(), "{bits:#06x}");
        }
    }
}
