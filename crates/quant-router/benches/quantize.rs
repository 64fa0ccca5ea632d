//! How fast weights are quantized with all threads, and what share of the memory's bandwidth that is: a copy of as many bytes as
//! quantizing moves (2 read and 1 written for each bf16 that becomes INT8) is timed beside it.
//!
//! Not criterion's: the ratio of two times is wanted. On a machine that others use too, the time that the processor spent says more
//! than that on the clock; both ratios are printed.
#![allow(clippy::print_stdout, clippy::expect_used, reason = "a benchmark of fixed input")]

use std::time::Instant;

use quant_router::formats::Number;
use quant_router::{PartRole, QuantBuffers, QuantKind, Quantizer};
use rayon::prelude::*;

/// A layer of a large model: 32 Mi elements, 64 MiB as bf16, more than caches hold.
const SHAPE: [u64; 2] = [4096, 8192];
/// Runs of each.
const ROUNDS: usize = 40;

/// The seconds of the fastest run, and those that all threads computed in a run on average.
fn seconds(mut run: impl FnMut()) -> (f64, f64) {
    let before = computed();
    let mut best = f64::INFINITY;
    for _ in 0..ROUNDS {
        let start = Instant::now();
        run();
        best = best.min(start.elapsed().as_secs_f64());
    }
    (best, (computed() - before) / ROUNDS as f64)
}

/// Seconds that all threads of this process computed so far, as Linux counts them in hundredths; 0 elsewhere.
fn computed() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

fn main() {
    // `cargo test --benches` runs this too, and needs no numbers.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let shape = if quick { [64, 64] } else { SHAPE };
    let elements = (shape[0] * shape[1]) as usize;
    // Numbers around 1, of both signs.
    let number = |index: u64| {
        let random = (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u16;
        (0x3f00 | random & 0x80ff).to_le_bytes()
    };
    let bf16: Vec<u8> = (0..elements as u64).flat_map(number).collect();
    // A copy reads and writes, so that one of 3/2 bytes an element moves as much as quantizing does.
    let mut copy = vec![1_u8; elements * 3 / 2];
    let share = copy.len().div_ceil(rayon::current_num_threads());
    let copied = seconds(|| {
        let pieces = copy.par_chunks_mut(share).zip(bf16.par_chunks(share));
        pieces.for_each(|(to, from)| to.copy_from_slice(&from[..to.len()]));
    });
    let bandwidth = elements as f64 * 3.0 / copied.0 / 1e9;
    for kind in QuantKind::ALL {
        let quantizer = Quantizer::new("layer.weight", &shape, Number::Bf16, kind).expect("quanto has it");
        let memory = |role| vec![1_u8; quantizer.bytes(role) as usize];
        let [mut data, mut scale, mut shift] =
            [PartRole::Data, PartRole::Scale, PartRole::ZeroPoint].map(memory);
        let quantized = seconds(|| {
            let mut into = QuantBuffers { data: &mut data, scale: &mut scale, shift: &mut shift };
            quantizer.quantize(&bf16, 0..shape[0], &mut into).expect("sizes fit");
        });
        let bytes = 2.0 + f64::from(kind.bits()) / 8.0;
        let rate = elements as f64 * bytes / quantized.0 / 1e9;
        println!(
            "{:>14} of bf16: {:5.2} 10⁹ elements/s, {rate:5.2} GB/s, copies {bandwidth:5.2}: {:3.0} %, by the \
             processor's time {:3.0} %",
            kind.name(),
            elements as f64 / quantized.0 / 1e9,
            rate / bandwidth * 100.0,
            copied.1 / quantized.1 * bytes / 3.0 * 100.0,
        );
    }
}
