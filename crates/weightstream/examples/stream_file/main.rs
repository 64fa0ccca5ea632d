//! Streams a network from its file with nothing page-locked but the staging ring: no part of the file is held in RAM, so
//! that it may be larger than the memory the process has.
//!
//! ```text
//! cargo run --release --example stream_file [-- host|cuda [LAYERS]]
//! ```
//!
//! Layers of 1024 × 1024 weights (160 of them unless asked otherwise: 640 MiB) are written to a safetensors file and read
//! from there in every step. In a memory control group of 512 MiB:
//!
//! ```text
//! systemd-run --scope -p MemoryMax=512M target/release/examples/stream_file
//! ```
//!
//! The outputs are compared with those of the same layers read one by one.

#![allow(unsafe_code, reason = "a network is computed from raw device addresses")]
#![allow(clippy::print_stdout, reason = "a program")]

#[path = "../mlp/compute.rs"]
mod compute;

use std::error::Error;
use std::path::Path;

use checkpoint::{Checkpoint, OpenOptions, TensorSpec, WriteOptions, Writer};
use compute::{Compute, resident_layer};
use weightstream::{
    Budget, Bytes, EngineOptions, FileBytes, Levels, Offloader, SourceFile, StagingOptions, StoreOptions,
    StreamHandle, TensorId, UnitId,
};

const WIDTH: usize = 1024;
const LAYER: usize = WIDTH * WIDTH * 4;
const LAYERS: usize = 160;
const STEPS: usize = 2;

fn main() -> Result<(), Box<dyn Error>> {
    let layers = std::env::args().nth(2).map_or(Ok(LAYERS), |count| count.parse())?;
    run(std::env::args().nth(1).as_deref(), layers)
}

/// Streams a network of so many layers on "host", on "cuda", or where there is a choice on the GPU.
pub(crate) fn run(device: Option<&str>, layers: usize) -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("network.safetensors");
    write_network(&path, layers)?;

    let compute = Compute::open(device)?;
    println!("device: {}", compute.driver().device_info().name);
    let input: Vec<f32> = (0..WIDTH).map(|i| (i as f32 * 0.37).sin()).collect();
    let expected = from_file(&path, layers, &input)?;
    let offloader = load(&path, layers, &compute)?;
    let stream = compute.stream();
    for step in 0..STEPS {
        if one_step(&offloader, &compute, layers, &input, stream)? != expected {
            return Err(format!("step {step} computed other numbers than the file's layers do").into());
        }
    }
    let report = offloader.report();
    let staging = report.engine.staging.ok_or("the network is page-locked")?;
    println!(
        "network: {} in {layers} layers, {} of it in its file",
        Bytes(report.model_bytes),
        Bytes(report.host.file_bytes)
    );
    println!("device memory: {}", Bytes(report.engine.page_bytes_peak));
    println!(
        "page-locked: {} of staging ring, {} chunks filled by {} threads{}",
        Bytes(staging.locked_bytes),
        staging.chunks,
        staging.threads,
        if staging.around_cache { ", read around the page cache" } else { "" },
    );
    println!("read in {STEPS} steps: {}", Bytes(report.engine.stats.staged_bytes));
    println!("outputs: identical in every step");
    offloader.close(stream)?;
    Ok(())
}

/// Opens the file and makes a model of it that streams from there.
fn load(path: &Path, layers: usize, compute: &Compute) -> Result<Offloader, Box<dyn Error>> {
    let network = Checkpoint::open(path, &OpenOptions::default())?;
    let mut model = Offloader::builder(compute.driver());
    let ids: Vec<TensorId> =
        (0..layers).map(|layer| model.tensor(name(layer), Bytes(LAYER as u64))).collect();
    model.tower("layers", ids.iter().map(|&id| (name(id.0 as usize), vec![id])).collect());
    model.budget(Budget::Bytes(Bytes(8 * LAYER as u64)));
    // Nothing of the model is page-locked; what passes through the ring is.
    model.store_options(StoreOptions { levels: Levels::NONE, ..StoreOptions::default() });
    let staging = StagingOptions { bytes: Some(Bytes::mib(32)), ..StagingOptions::default() };
    model.engine_options(EngineOptions { staging, ..EngineOptions::default() });

    let mut planned = model.plan()?;
    let file = SourceFile::new(network.files()[0].file().clone(), path)?;
    for (layer, &id) in ids.iter().enumerate() {
        let tensor = network.get(&name(layer)).ok_or("a layer is missing")?;
        let bytes = FileBytes::new(&file, tensor.range.start, Bytes(tensor.bytes()))?;
        planned.source(vec![(id, bytes)])?;
    }
    Ok(planned.start()?)
}

fn one_step(
    offloader: &Offloader,
    compute: &Compute,
    layers: usize,
    input: &[f32],
    stream: StreamHandle,
) -> Result<Vec<f32>, Box<dyn Error>> {
    compute.set_input(input)?;
    offloader.begin_step(stream)?;
    for layer in 0..layers as u32 {
        offloader.enter(UnitId(layer), stream)?;
        // SAFETY: the layer's weights are present for what is submitted to `stream` until `leave`.
        unsafe { compute.layer(offloader.address(TensorId(layer))?) }?;
        offloader.leave(UnitId(layer), stream)?;
    }
    offloader.end_step(stream)?;
    compute.output()
}

/// What the network computes, with one layer in RAM at a time.
fn from_file(path: &Path, layers: usize, input: &[f32]) -> Result<Vec<f32>, Box<dyn Error>> {
    let network = Checkpoint::open(path, &OpenOptions::default())?;
    let (mut values, mut weights) = (input.to_vec(), vec![0; LAYER]);
    for layer in 0..layers {
        let tensor = network.get(&name(layer)).ok_or("a layer is missing")?;
        network.files()[tensor.file].read_exact_at(tensor.range.start, &mut weights)?;
        values = resident_layer(&weights, &values);
    }
    Ok(values)
}

fn write_network(path: &Path, layers: usize) -> Result<(), Box<dyn Error>> {
    let shape = vec![WIDTH as u64; 2];
    let spec = |layer| TensorSpec { name: name(layer), dtype: safetensors::Dtype::F32, shape: shape.clone() };
    let mut writer = Writer::create(path, (0..layers).map(spec).collect(), &WriteOptions::default())?;
    for layer in writer.order().to_vec() {
        writer.write(layer, &layer_weights(layer))?;
    }
    Ok(writer.finish()?)
}

fn name(layer: usize) -> String {
    format!("layers.{layer}.weight")
}

/// Weights of one layer as bytes: small numbers without a pattern, so that activations neither vanish nor explode.
fn layer_weights(layer: usize) -> Vec<u8> {
    let mut seed = layer as u64 + 1;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((seed >> 40) as f32 / (1_u64 << 24) as f32 - 0.5) * 0.1
    };
    (0..WIDTH * WIDTH).flat_map(|_| next().to_le_bytes()).collect()
}
