//! Rows of a quantized weight as numbers: bounds checked once, then decoded in pieces by all threads. What each format
//! computes is its decoder's; here is what all share.

use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::error::{QuantError, Result};
use crate::parts::Parts;
use crate::weight::{Format, Part, QuantWeight};
use crate::widest::{Loop, widest};
use crate::{formats, ggml};

/// Elements of a piece that one thread decodes: enough to be worth a task, few enough to stay in the second-level cache.
const PIECE: usize = 1 << 15;
/// Elements decoded into scratch at a time where the target is no f32: 16 KiB, half of a first-level cache.
const SCRATCH: usize = 1 << 12;

/// A weight whose parts were found and have the right sizes: it cannot fail any more.
///
/// Elements are counted in the order of the logical shape, the last dimension fastest. `granule` of them are decoded
/// together.
pub trait Decode: Sync {
    /// Elements that can only be decoded together; at least 1. It divides the number of elements.
    fn granule(&self) -> usize;

    /// Writes the elements from `first` on, in the precision of f32. `first` and the length of `out` are multiples of
    /// the granule, and inside the weight.
    fn decode(&self, first: usize, out: &mut [f32]);
}

/// Memory for numbers.
#[derive(Debug)]
pub enum Target<'a> {
    /// Single precision: what decoders compute.
    F32(&'a mut [f32]),
    /// Rounded to the nearest bf16, ties to even.
    Bf16(&'a mut [bf16]),
    /// Rounded to the nearest f16, ties to even; beyond its range, infinity.
    F16(&'a mut [f16]),
}

impl Target<'_> {
    fn len(&self) -> usize {
        match self {
            Self::F32(slice) => slice.len(),
            Self::Bf16(slice) => slice.len(),
            Self::F16(slice) => slice.len(),
        }
    }
}

/// Writes some rows of a weight, as numbers, into memory of exactly their size.
///
/// Rows are those of the logical matrix: all dimensions but the last. Uses the threads of the rayon pool that it is called in,
/// and for each of them a scratch of 16 KiB or one granule of the format. On an error nothing was written.
pub fn dequantize(
    weight: &QuantWeight,
    parts: &dyn Parts,
    rows: Range<u64>,
    target: Target<'_>,
) -> Result<()> {
    let (all, columns) = (weight.rows()?, weight.columns());
    if rows.start > rows.end || rows.end > all {
        let (start, end) = (rows.start, rows.end);
        return Err(QuantError::Rows { layer: weight.name.clone(), start, end, rows: all });
    }
    // Neither product overflows: both are at most all elements, which were counted.
    weight.elements()?;
    let (first, need) = (rows.start * columns, (rows.end - rows.start) * columns);
    if need != target.len() as u64 {
        let (have, layer) = (target.len() as u64, weight.name.clone());
        return Err(QuantError::TargetSize { layer, have, need });
    }
    let decoder = decoder(weight, parts)?;
    let first = first as usize;
    match target {
        Target::F32(out) => pieces(&*decoder, first, out, straight),
        Target::Bf16(out) => pieces(&*decoder, first, out, |decoder, first, out| {
            through(decoder, first, out, to_bf16);
        }),
        Target::F16(out) => pieces(&*decoder, first, out, |decoder, first, out| {
            through(decoder, first, out, |from, to| to.convert_from_f32_slice(from));
        }),
    }
    Ok(())
}

/// Whether a weight's numbers can be had from these parts: all are there, of the right sizes, and no index among them leads beyond what it
/// is an index of. Who gives parts to a device asks this first: no kernel does.
///
/// # Errors
/// The one that [`dequantize`] would give for any rows.
pub fn check(weight: &QuantWeight, parts: &dyn Parts) -> Result<()> {
    decoder(weight, parts).map(drop)
}

/// The decoder of a weight's format over its parts' bytes, all sizes and indexes checked.
fn decoder<'a>(weight: &QuantWeight, parts: &'a dyn Parts) -> Result<Box<dyn Decode + 'a>> {
    match weight.format {
        Format::Ggml(kind) => ggml::decoder(weight, kind, parts),
        Format::Scaled(scaled) => formats::scaled::decoder(weight, scaled, parts),
        Format::Bnb4(format) => formats::bnb::decoder(weight, format, parts),
        Format::QuantoBits(format) => formats::quanto::decoder(weight, format, parts),
        Format::PackedInt(format) => formats::packed_int::decoder(weight, format, parts),
        Format::W4A8(format) => formats::w4a8::decoder(weight, format, parts),
        Format::Svdq(format) => formats::nunchaku::svdq_decoder(weight, format, parts),
        Format::NunchakuAwq => formats::nunchaku::awq_decoder(weight, parts),
    }
}

/// The bytes of a part, which must be exactly so many.
pub(crate) fn part_bytes<'a>(
    weight: &QuantWeight,
    part: &Part,
    parts: &'a dyn Parts,
    need: u64,
) -> Result<&'a [u8]> {
    let bytes = parts.bytes(&part.tensor).ok_or_else(|| QuantError::PartNotGiven {
        layer: weight.name.clone(),
        role: part.role,
        tensor: part.tensor.clone(),
    })?;
    let have = bytes.len() as u64;
    if have != need {
        let (layer, tensor) = (weight.name.clone(), part.tensor.clone());
        return Err(QuantError::PartSize { layer, role: part.role, tensor, have, need });
    }
    Ok(bytes)
}

/// Cuts a target at granules and gives the pieces to all threads.
fn pieces<T: Send>(
    decoder: &dyn Decode,
    first: usize,
    out: &mut [T],
    run: impl Fn(&dyn Decode, usize, &mut [T]) + Sync,
) {
    let granule = decoder.granule();
    let piece = PIECE.next_multiple_of(granule);
    // Up to the next granule the elements are a piece of their own, so that the others begin at one.
    let head = (first.next_multiple_of(granule) - first).min(out.len());
    let (before, rest) = out.split_at_mut(head);
    if !before.is_empty() {
        run(decoder, first, before);
    }
    let first = first + head;
    rest.par_chunks_mut(piece).enumerate().for_each(|(index, out)| run(decoder, first + index * piece, out));
}

/// Decodes into the target itself, and what is less than a granule at its ends through scratch.
fn straight(decoder: &dyn Decode, first: usize, out: &mut [f32]) {
    let granule = decoder.granule();
    if first.is_multiple_of(granule) {
        let whole = out.len() - out.len() % granule;
        let (whole_out, tail) = out.split_at_mut(whole);
        decoder.decode(first, whole_out);
        if !tail.is_empty() {
            through(decoder, first + whole, tail, |from, to| to.copy_from_slice(from));
        }
    } else {
        through(decoder, first, out, |from, to| to.copy_from_slice(from));
    }
}

/// Decodes whole granules into scratch and passes on what of them was asked for.
fn through<T>(decoder: &dyn Decode, first: usize, out: &mut [T], pass: impl Fn(&[f32], &mut [T])) {
    let granule = decoder.granule();
    let step = SCRATCH.next_multiple_of(granule);
    let (begin, end) = (first, first + out.len());
    let mut at = begin - begin % granule;
    let longest = step.min(end.next_multiple_of(granule) - at);
    let mut scratch = vec![0.0; longest];
    while at < end {
        let length = step.min(end.next_multiple_of(granule) - at);
        let decoded = &mut scratch[..length];
        decoder.decode(at, decoded);
        let (from, to) = (at.max(begin), (at + length).min(end));
        pass(&decoded[from - at..to - at], &mut out[from - begin..to - begin]);
        at += length;
    }
}

/// Rounds to the nearest, ties to even. Without branches, which the compiler turns into vector code.
fn to_bf16(from: &[f32], to: &mut [bf16]) {
    widest(ToBrain { from, to });
}

struct ToBrain<'a> {
    from: &'a [f32],
    to: &'a mut [bf16],
}

impl Loop for ToBrain<'_> {
    #[inline(always)]
    fn run(self) {
        for (to, from) in self.to.iter_mut().zip(self.from) {
            let bits = from.to_bits();
            // Wraps around for NaN only, which is not taken from there.
            let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
            // A NaN stays one, also where the bits that made it one were the low ones.
            let quiet = bits >> 16 | 0x40;
            *to = bf16::from_bits(if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded } as u16);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::widest::tests::Way;

    #[test]
    fn rounding_to_bf16_is_that_of_the_half_crate() {
        let high = 0..=u32::from(u16::MAX);
        for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
            let from: Vec<f32> = high.clone().map(|high| f32::from_bits(high << 16 | low)).collect();
            for way in Way::ALL {
                let mut to = vec![bf16::ZERO; from.len()];
                let ran = way.run(ToBrain { from: &from, to: &mut to });
                for (from, to) in from.iter().zip(to).filter(|_| ran) {
                    assert_eq!(
                        to.to_bits(),
                        bf16::from_f32(*from).to_bits(),
                        "{way:?} {:#x}",
                        from.to_bits()
                    );
                }
            }
        }
    }
}
