//! What every kernel is tried on: quantized weights with their bytes, and a device that is told to decode them.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

pub(crate) mod corpus;
pub(crate) mod made;
pub(crate) mod rig;
pub(crate) mod words;

use std::collections::BTreeMap;

use quant_router::QuantWeight;

/// A weight and its parts.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) name: String,
    pub(crate) weight: QuantWeight,
    pub(crate) parts: BTreeMap<String, Vec<u8>>,
}

/// Bytes without order: a linear congruential generator.
pub(crate) fn noise(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    next.take(length).collect()
}

/// All of them.
pub(crate) fn cases() -> Vec<Case> {
    let mut all = corpus::ggml();
    all.extend(corpus::formats());
    all.extend(made::ggml());
    all.extend(made::formats());
    all.extend(words::all());
    all
}
