//! How fast weights are quantized with all threads, and what share of the memory's bandwidth that is: a copy of as many bytes as
//! quantizing moves (2 read and 1 written for each bf16 that becomes INT8) is timed in turn with it.
//!
//! Not criterion's: the ratio of two times is wanted, of runs next to each other on a machine that others use too. There the time
//! that the processor spent says more than that on the clock; both ratios are printed.
#![allow(clippy::print_stdout, clippy::expect_used, reason = "a benchmark of fixed input")]

use std::time::Instant;

use quant_router::formats::Number;
use quant_router::{PartRole, QuantBuffers, QuantKind, Quantizer};
use rayon::prelude::*;

/// A layer of a large model: 32 Mi elements, 64 MiB as bf16, more than caches hold.
const SHAPE: [u64; 2] = [4096, 8192];
/// Runs of each, by turns.
const ROUNDS: usize = 40;

/// Seconds on the clock, and those that all threads of this process computed.
fn seconds(run: impl FnOnce()) -> [f64; 2] {
    let (start, before) = (Instant::now(), computed());
    run();
    [start.elapsed().as_secs_f64(), computed() - before]
}

/// Seconds that all threads of this process computed so far, as Linux counts them; 0 elsewhere.
fn computed() -> f64 {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return 0.0 };
    let nanoseconds = threads.filter_map(|thread| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    nanoseconds.sum::<f64>() / 1e9
}

fn main() {
    // `cargo test --benches` runs this too, and needs no numbers.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let shape = if quick { [64, 64] } else { SHAPE };
    let elements = (shape[0] * shape[1]) as usize;
    // Numbers around 1, of both signs.
    let bf16: Vec<u8> = (0..elements as u64)
        .flat_map(|index| {
            let random = (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 48) as u16;
            (0x3f00 | random & 0x80ff).to_le_bytes()
        })
        .collect();
    // A copy reads and writes, so that one of 3/2 bytes an element moves as much as quantizing does.
    let mut copy = vec![1_u8; elements * 3 / 2];
    let half = copy.len() / rayon::current_num_threads();
    for kind in QuantKind::ALL {
        let quantizer = Quantizer::new("layer.weight", &shape, Number::Bf16, kind).expect("quanto has it");
        let [mut data, mut scale, mut shift] = [PartRole::Data, PartRole::Scale, PartRole::ZeroPoint]
            .map(|role| vec![1_u8; quantizer.bytes(role) as usize]);
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let copied = seconds(|| {
                let from = bf16.par_chunks(half.max(1));
                copy.par_chunks_mut(half.max(1))
                    .zip(from)
                    .for_each(|(to, from)| to.copy_from_slice(&from[..to.len()]));
            });
            let quantized = seconds(|| {
                let mut into = QuantBuffers { data: &mut data, scale: &mut scale, shift: &mut shift };
                quantizer.quantize(&bf16, 0..shape[0], &mut into).expect("sizes fit");
            });
            times.push((quantized, copied));
        }
        let best =
            |time: fn(&([f64; 2], [f64; 2])) -> f64| times.iter().map(time).fold(f64::INFINITY, f64::min);
        let (quantized, copied) = (best(|times| times.0[0]), best(|times| times.1[0]));
        let by_processor = best(|times| times.1[1]) / best(|times| times.0[1]);
        let moved = elements as f64 * (2.0 + f64::from(kind.bits()) / 8.0);
        let (rate, bandwidth) = (moved / quantized / 1e9, elements as f64 * 3.0 / copied / 1e9);
        println!(
            "{:>14} of bf16: {:5.2} 10⁹ elements/s, {rate:5.2} GB/s moved, copies {bandwidth:5.2} GB/s: {:3.0} %, by the \
             processor's time {:3.0} %",
            kind.name(),
            elements as f64 / quantized / 1e9,
            rate / bandwidth * 100.0,
            by_processor * moved / (elements as f64 * 3.0) * 100.0,
        );
    }
}
