//! How fast weights with scales beside them become numbers, on one thread: elements a second, by format.
#![expect(clippy::expect_used, reason = "a benchmark of fixed input")]
#![allow(missing_docs, reason = "criterion's macros make public items")]

use std::collections::BTreeMap;
use std::io;

use checkpoint::safetensors::dtype_from_name;
use checkpoint::{TensorInfo, TensorType};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use quant_router::detect::{Handlers, Header};
use quant_router::{QuantWeight, Target, dequantize};

/// Rows and columns of the weight: 4 Mi elements, 16 MiB as f32.
const SHAPE: [u64; 2] = [1024, 4096];
/// A file: tensors by what follows the layer's name, with type and shape.
type File = &'static [(&'static str, &'static str, &'static [u64])];
/// Bytes of text that describes a layer.
const NF4: &str = r#"{"quant_type":"nf4","blocksize":64,"shape":[1024,4096]}"#;

const FILES: &[(&str, File)] = &[
    ("FP8, one scale", &[("weight", "F8_E4M3", &SHAPE), ("weight_scale", "F32", &[])]),
    ("FP8, 128 × 128", &[("weight", "F8_E4M3", &SHAPE), ("weight_scale_inv", "F32", &[8, 32])]),
    ("INT8, a scale a row", &[("weight", "I8", &SHAPE), ("weight_scale", "F32", &[1024, 1])]),
    (
        "NVFP4",
        &[
            ("weight", "U8", &[1024, 2048]),
            ("weight_scale", "F8_E4M3", &[1024, 256]),
            ("weight_scale_2", "F32", &[]),
        ],
    ),
    ("MXFP8", &[("weight", "F8_E4M3", &[1024, 4064]), ("weight_scale", "U8", &[1024, 128])]),
    (
        "NF4",
        &[
            ("weight", "U8", &[2_097_152, 1]),
            ("weight.absmax", "F32", &[65536]),
            ("weight.quant_map", "F32", &[16]),
            ("weight.quant_state.bitsandbytes__nf4", "U8", &[NF4.len() as u64]),
        ],
    ),
    (
        "quanto qint4",
        &[
            ("weight._data._data", "U8", &[16384, 128]),
            ("weight._scale", "BF16", &[32768, 1]),
            ("weight._shift", "BF16", &[32768, 1]),
        ],
    ),
    (
        "SVDQuant INT4, rank 32",
        &[
            ("qweight", "I8", &[1024, 2048]),
            ("wscales", "BF16", &[64, 1024]),
            ("smooth_factor", "BF16", &[4096]),
            ("proj_down", "BF16", &[4096, 32]),
            ("proj_up", "BF16", &[1024, 32]),
        ],
    ),
];

/// The weight of a file, and bytes without order.
fn weight(file: File) -> (QuantWeight, BTreeMap<String, Vec<u8>>) {
    let mut tensors = Vec::new();
    let mut parts = BTreeMap::new();
    for (name, dtype, shape) in file {
        let dtype = dtype_from_name(dtype).expect("a type of the format");
        let bytes = shape.iter().product::<u64>() * dtype.bitsize() as u64 / 8;
        let name = format!("layer.{name}");
        let content = (0..bytes).map(|index| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8);
        parts.insert(name.clone(), content.collect());
        let kind = TensorType::Plain(dtype);
        tensors.push(TensorInfo { name, kind, shape: shape.to_vec(), file: 0, range: 0..bytes });
    }
    let metadata = BTreeMap::new();
    let read = |_: &TensorInfo| -> io::Result<Vec<u8>> { Ok(NF4.into()) };
    let header = Header::new(&tensors, &metadata, &read);
    let found = Handlers::default().detect(&header).expect("a good file").weights;
    (found.into_values().next().expect("a weight").weight, parts)
}

fn formats(criterion: &mut Criterion) {
    let single = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a thread");
    for (name, file) in FILES {
        let (weight, parts) = weight(file);
        let (rows, elements) = (weight.rows().expect("small"), weight.elements().expect("small"));
        let mut group = criterion.benchmark_group(*name);
        group.throughput(Throughput::Elements(elements));
        let mut out = vec![0.0_f32; elements as usize];
        let mut decode = || dequantize(&weight, &parts, 0..rows, Target::F32(&mut out)).expect("sizes fit");
        group.bench_function("f32, one thread", |bencher| bencher.iter(|| single.install(&mut decode)));
    }
}

criterion_group!(benches, formats);
criterion_main!(benches);
