//! Quantizing: the numbers of optimum-quanto bit for bit, whatever rows are asked for, and back again by the same code as files'.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod properties;
mod quanto;

use std::collections::BTreeMap;

use quant_router::formats::Number;
use quant_router::{PartRole, QuantBuffers, QuantKind, Quantizer};

/// What is where nothing was written.
const UNWRITTEN: u8 = 0xa5;

/// The parts of a weight, in memory of their own.
struct Parts {
    data: Vec<u8>,
    scale: Vec<u8>,
    shift: Vec<u8>,
}

impl Parts {
    fn of(quantizer: &Quantizer) -> Self {
        let bytes = |role| vec![UNWRITTEN; quantizer.bytes(role) as usize];
        Self { data: bytes(PartRole::Data), scale: bytes(PartRole::Scale), shift: bytes(PartRole::ZeroPoint) }
    }

    fn buffers(&mut self) -> QuantBuffers<'_> {
        QuantBuffers { data: &mut self.data, scale: &mut self.scale, shift: &mut self.shift }
    }

    /// By the names of their tensors.
    fn named(self, quantizer: &Quantizer) -> BTreeMap<String, Vec<u8>> {
        let name = |role| quantizer.weight().part(role).map(|part| part.tensor.clone());
        let all =
            [(PartRole::Data, self.data), (PartRole::Scale, self.scale), (PartRole::ZeroPoint, self.shift)];
        all.into_iter().filter_map(|(role, bytes)| Some((name(role)?, bytes))).collect()
    }
}

/// All rows of a weight, quantized.
fn quantize(shape: &[u64], number: Number, kind: QuantKind, source: &[u8]) -> (Quantizer, Parts) {
    let quantizer = Quantizer::new("layer.weight", shape, number, kind).unwrap();
    let mut parts = Parts::of(&quantizer);
    quantizer.quantize(source, 0..shape[0], &mut parts.buffers()).unwrap();
    (quantizer, parts)
}
