//! How fast weights are quantized with all threads, and what share of the memory's bandwidth that is: a copy of as many bytes as
//! quantizing moves (2 read and 1 written for each bf16 that becomes INT8) is timed just before each run.
//!
//! Not criterion's: the ratio of two times is wanted. On a machine that others use too, the time that the processor spent says more
//! than that on the clock; both ratios are printed, as medians of pairs.
#![allow(clippy::print_stdout, clippy::expect_used, reason = "a benchmark of fixed input")]

use std::time::Instant;

use quant_router::formats::Number;
use quant_router::{PartRole, QuantBuffers, QuantKind, Quantizer};
use rayon::prelude::*;
use rustix::time::{ClockId, clock_gettime};

/// A layer of a large model: 32 Mi elements, 64 MiB as bf16, more than caches hold.
const SHAPE: [u64; 2] = [4096, 8192];
/// Pairs of a copy and a run.
const ROUNDS: usize = 31;
/// Per cent of the memory's bandwidth that INT8 shall reach.
const WANTED: f64 = 50.0;

/// Seconds on the clock, and those that all threads computed.
fn seconds(run: impl FnOnce()) -> [f64; 2] {
    let (before, start) = (computed(), Instant::now());
    run();
    [start.elapsed().as_secs_f64(), computed() - before]
}

/// Seconds that all threads of this process computed so far.
fn computed() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers[numbers.len() / 2]
}

fn main() {
    // `cargo test --benches` runs this too, and needs no numbers.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let (shape, rounds) = if quick { ([64, 64], 1) } else { (SHAPE, ROUNDS) };
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
    for kind in QuantKind::ALL {
        let quantizer = Quantizer::new("layer.weight", &shape, Number::Bf16, kind).expect("quanto has it");
        let memory = |role| vec![1_u8; quantizer.bytes(role) as usize];
        let [mut data, mut scale, mut shift] =
            [PartRole::Data, PartRole::Scale, PartRole::ZeroPoint].map(memory);
        let bytes = 2.0 + f64::from(kind.bits()) / 8.0;
        let mut round = || {
            let copied = seconds(|| {
                let pieces = copy.par_chunks_mut(share).zip(bf16.par_chunks(share));
                pieces.for_each(|(to, from)| to.copy_from_slice(&from[..to.len()]));
            });
            let quantized = seconds(|| {
                let mut into = QuantBuffers { data: &mut data, scale: &mut scale, shift: &mut shift };
                quantizer.quantize(&bf16, 0..shape[0], &mut into).expect("sizes fit");
            });
            let percent = |which: usize| copied[which] / quantized[which] * bytes / 3.0 * 100.0;
            (quantized[0], [percent(0), percent(1)])
        };
        let rounds: Vec<_> = (0..rounds).map(|_| round()).collect();
        let of = |pick: fn(&(f64, [f64; 2])) -> f64| median(rounds.iter().map(pick).collect());
        let computed = of(|round| round.1[1]);
        let verdict = match kind {
            QuantKind::QInt8 if computed >= WANTED => format!(", at least {WANTED:.0} %: holds"),
            QuantKind::QInt8 => format!(", at least {WANTED:.0} %: missed"),
            _ => String::new(),
        };
        println!(
            "{:>14} of bf16: {:5.2} 10⁹ elements/s, {:3.0} % of a copy by the clock, by the processor's time {computed:3.0} %{verdict}",
            kind.name(),
            elements as f64 / of(|round| round.0) / 1e9,
            of(|round| round.1[0]),
        );
    }
}
