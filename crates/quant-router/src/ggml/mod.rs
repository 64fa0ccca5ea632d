//! The block types of ggml as numbers: one decoder a type, in the order of operations of the `gguf` Python package, so that
//! results are equal bit for bit.
//!
//! ```text
//! tensor   | block | block | block | …      each is the same number of bytes and elements, and holds its own scales
//! Q4_0     d: f16 | 16 bytes: low nibbles are elements 0..16, high ones 16..32       w = d · (q − 8)
//! ```
//!
//! Decoders take blocks as arrays of a fixed size: no length is looked at inside them, nothing in them can fail, and the
//! compiler unrolls and vectorizes their loops.

mod codebook;
mod four_bit;
mod k;
mod scalar;
mod simple;
mod tables;
mod ternary;

use checkpoint::gguf::GgmlType;

use crate::dequantize::{Decode, part_bytes};
use crate::error::Result;
use crate::parts::Parts;
use crate::weight::{PartRole, QuantWeight};

/// Decodes whole blocks, as many as there are.
type DecodeBlocks = fn(&[u8], &mut [f32]);

/// The blocks of one tensor.
struct Blocks<'a> {
    bytes: &'a [u8],
    block_bytes: usize,
    block_elements: usize,
    decode: DecodeBlocks,
}

impl Decode for Blocks<'_> {
    fn granule(&self) -> usize {
        self.block_elements
    }

    fn decode(&self, first: usize, out: &mut [f32]) {
        let start = first / self.block_elements * self.block_bytes;
        let length = out.len() / self.block_elements * self.block_bytes;
        (self.decode)(&self.bytes[start..start + length], out);
    }
}

/// The decoder of a weight of this type over its bytes, whose number is checked.
pub(crate) fn decoder<'a>(
    weight: &QuantWeight,
    kind: GgmlType,
    parts: &'a dyn Parts,
) -> Result<Box<dyn Decode + 'a>> {
    let decode = blocks_decoder(kind).ok_or_else(|| weight.bad_shape("its type holds no blocks"))?;
    // Blocks go on over the ends of rows where a converter flattened the shape, so that only their sum has to be whole.
    let need = kind.row_bytes(weight.elements()?);
    let need = need.ok_or_else(|| weight.bad_shape("its elements are no whole number of blocks"))?;
    let bytes = part_bytes(weight, weight.needs(PartRole::Data)?, parts, need)?;
    let (block_bytes, block_elements) = (kind.block_bytes() as usize, kind.block_elements() as usize);
    Ok(Box::new(Blocks { bytes, block_bytes, block_elements, decode }))
}

/// What decodes blocks of this type; none for types that have no blocks.
fn blocks_decoder(kind: GgmlType) -> Option<DecodeBlocks> {
    Some(match kind {
        GgmlType::Q4_0 => |bytes, out| each(bytes, out, simple::q4_0),
        GgmlType::Q4_1 => |bytes, out| each(bytes, out, simple::q4_1),
        GgmlType::Q5_0 => |bytes, out| each(bytes, out, simple::q5_0),
        GgmlType::Q5_1 => |bytes, out| each(bytes, out, simple::q5_1),
        GgmlType::Q8_0 => |bytes, out| each(bytes, out, simple::q8_0),
        GgmlType::Q8_1 => |bytes, out| each(bytes, out, simple::q8_1),
        GgmlType::Q1_0 => |bytes, out| each(bytes, out, simple::q1_0),
        GgmlType::Q2_0 => |bytes, out| each(bytes, out, simple::q2_0),
        GgmlType::Q2_K => |bytes, out| each(bytes, out, k::q2_k),
        GgmlType::Q3_K => |bytes, out| each(bytes, out, k::q3_k),
        GgmlType::Q4_K => |bytes, out| each(bytes, out, k::q4_k),
        GgmlType::Q5_K => |bytes, out| each(bytes, out, k::q5_k),
        GgmlType::Q6_K => |bytes, out| each(bytes, out, k::q6_k),
        GgmlType::Q8_K => |bytes, out| each(bytes, out, k::q8_k),
        GgmlType::IQ4_NL => |bytes, out| each(bytes, out, four_bit::iq4_nl),
        GgmlType::IQ4_XS => |bytes, out| each(bytes, out, four_bit::iq4_xs),
        GgmlType::MXFP4 => |bytes, out| each(bytes, out, four_bit::mxfp4),
        GgmlType::NVFP4 => |bytes, out| each(bytes, out, four_bit::nvfp4),
        GgmlType::TQ1_0 => |bytes, out| each(bytes, out, ternary::tq1_0),
        GgmlType::TQ2_0 => |bytes, out| each(bytes, out, ternary::tq2_0),
        GgmlType::IQ1_S => |bytes, out| each(bytes, out, codebook::iq1_s),
        GgmlType::IQ1_M => |bytes, out| each(bytes, out, codebook::iq1_m),
        GgmlType::IQ2_XXS => |bytes, out| each(bytes, out, codebook::iq2_xxs),
        GgmlType::IQ2_XS => |bytes, out| each(bytes, out, codebook::iq2_xs),
        GgmlType::IQ2_S => |bytes, out| each(bytes, out, codebook::iq2_s),
        GgmlType::IQ3_XXS => |bytes, out| each(bytes, out, codebook::iq3_xxs),
        GgmlType::IQ3_S => |bytes, out| each(bytes, out, codebook::iq3_s),
        _ => return None,
    })
}

/// Runs a decoder on each block and its place.
#[inline]
fn each<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    let (blocks, _) = bytes.as_chunks::<BYTES>();
    let (places, _) = out.as_chunks_mut::<ELEMENTS>();
    for (block, place) in blocks.iter().zip(places) {
        decode(block, place);
    }
}
