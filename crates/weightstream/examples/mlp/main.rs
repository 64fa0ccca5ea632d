//! Streams a network through a fifth of its size and compares every output with the resident computation.
//!
//! ```text
//! cargo run --release --example mlp [-- host|cuda]
//! ```
//!
//! Twelve layers of 1024 × 1024 weights are held in RAM. On a machine with an NVIDIA GPU each layer is computed by a
//! CUDA kernel from the weights' addresses; on the emulator, whose addresses are this process's, by the host.

#![allow(unsafe_code, reason = "a network is computed from raw device addresses")]
#![allow(clippy::print_stdout, reason = "a program")]

mod compute;

use std::error::Error;
use std::sync::Arc;

use compute::{Compute, resident_layer};
use weightstream::{Budget, Bytes, HostBytes, Offloader, TensorId, UnitId};

const LAYERS: usize = 12;
const WIDTH: usize = 1024;
const STEPS: usize = 4;

fn main() -> Result<(), Box<dyn Error>> {
    run(std::env::args().nth(1).as_deref())
}

/// Streams the network on "host", on "cuda", or where there is a choice on the GPU.
pub(crate) fn run(device: Option<&str>) -> Result<(), Box<dyn Error>> {
    let compute = Compute::open(device)?;
    println!("device: {}", compute.driver().device_info().name);

    let weights: Vec<Arc<Vec<u8>>> = (0..LAYERS).map(layer_weights).collect();
    let whole = (LAYERS * WIDTH * WIDTH * 4) as u64;
    let mut model = Offloader::builder(compute.driver());
    let ids: Vec<TensorId> =
        weights.iter().map(|bytes| model.tensor("weight", Bytes(bytes.len() as u64))).collect();
    model.tower("layers", ids.iter().map(|&id| (format!("layers.{}", id.0), vec![id])).collect());
    model.budget(Budget::Bytes(Bytes(whole / 5)));

    let mut planned = model.plan()?;
    for (&id, bytes) in ids.iter().zip(&weights) {
        planned.source(vec![(id, HostBytes::of(bytes))])?;
    }
    let offloader = planned.start()?;

    let input: Vec<f32> = (0..WIDTH).map(|i| (i as f32 * 0.37).sin()).collect();
    let mut expected = input.clone();
    for bytes in &weights {
        expected = resident_layer(bytes, &expected);
    }
    let stream = compute.stream();
    for step in 0..STEPS {
        compute.set_input(&input)?;
        offloader.begin_step(stream)?;
        for (unit, &id) in ids.iter().enumerate() {
            offloader.enter(UnitId(unit as u32), stream)?;
            // SAFETY: the layer's weights are present for what is submitted to `stream` until `leave`.
            unsafe { compute.layer(offloader.address(id)?) }?;
            offloader.leave(UnitId(unit as u32), stream)?;
        }
        offloader.end_step(stream)?;
        let output = compute.output()?;
        if output != expected {
            return Err(format!("step {step} computed other numbers than the resident network").into());
        }
    }

    let report = offloader.report();
    println!("network: {} of weights in {LAYERS} layers", Bytes(whole));
    println!("device memory: {} of a budget of {}", Bytes(report.engine.page_bytes_peak), Bytes(whole / 5));
    println!("copied: {} in {STEPS} steps", Bytes(report.engine.stats.copied_bytes));
    println!("outputs: identical to the resident network's in every step");
    offloader.close(stream)?;
    Ok(())
}

/// Weights of one layer as bytes: small numbers without a pattern, so that activations neither vanish nor explode.
fn layer_weights(layer: usize) -> Arc<Vec<u8>> {
    let mut seed = layer as u64 + 1;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((seed >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * 0.1
    };
    Arc::new((0..WIDTH * WIDTH).flat_map(|_| next().to_le_bytes()).collect())
}
