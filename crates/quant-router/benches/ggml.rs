//! How fast blocks become numbers, on one thread and on all: elements a second, by type and target.
#![expect(clippy::expect_used, reason = "a benchmark of fixed input")]
#![allow(missing_docs, reason = "criterion's macros make public items")]

use checkpoint::gguf::GgmlType;
use checkpoint::{TensorInfo, TensorType};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use quant_router::{QuantWeight, Target, dequantize};

/// Rows and columns of the weight: 4 Mi elements, 16 MiB as f32.
const SHAPE: [u64; 2] = [1024, 4096];

/// A weight of some type, and blocks without order.
fn weight(kind: GgmlType) -> (QuantWeight, Vec<u8>) {
    let tensor = TensorInfo {
        name: "layer.weight".into(),
        kind: TensorType::Ggml(kind),
        shape: SHAPE.to_vec(),
        file: 0,
        range: 0..0,
    };
    let length = SHAPE[0] * kind.row_bytes(SHAPE[1]).expect("blocks divide the rows");
    let bytes = (0..length).map(|index| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    (QuantWeight::ggml(&tensor).expect("it is quantized"), bytes)
}

fn types(criterion: &mut Criterion) {
    let single = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    for kind in GgmlType::all().filter(|kind| kind.is_quantized()) {
        let (weight, bytes) = weight(kind);
        let parts = ("layer.weight", &bytes);
        let mut group = criterion.benchmark_group(kind.name());
        group.throughput(Throughput::Elements(SHAPE[0] * SHAPE[1]));
        let mut out = vec![0.0_f32; (SHAPE[0] * SHAPE[1]) as usize];
        let mut to_f32 = || {
            dequantize(&weight, &parts, 0..SHAPE[0], Target::F32(&mut out)).expect("sizes fit");
        };
        group.bench_function("f32, one thread", |bencher| bencher.iter(|| single.install(&mut to_f32)));
        group.bench_function("f32", |bencher| bencher.iter(&mut to_f32));
        let mut out = vec![bf16::ZERO; (SHAPE[0] * SHAPE[1]) as usize];
        let mut to_bf16 = || {
            dequantize(&weight, &parts, 0..SHAPE[0], Target::Bf16(&mut out)).expect("sizes fit");
        };
        group.bench_function("bf16", |bencher| bencher.iter(&mut to_bf16));
    }
}

criterion_group!(benches, types);
criterion_main!(benches);
