//! Times the dequantization of a file of blocks: `rate TYPE FILE COLUMNS TARGET THREADS`. Prints the best seconds of several
//! runs. What `tools/rate.py` sets beside the `gguf` package.
#![expect(clippy::print_stdout, reason = "its output")]

use std::error::Error;
use std::time::{Duration, Instant};

use checkpoint::gguf::GgmlType;
use checkpoint::{TensorInfo, TensorType};
use half::{bf16, f16};
use quant_router::{QuantWeight, Target, dequantize};

/// Runs at least this long, and at least three times.
const LONG_ENOUGH: Duration = Duration::from_millis(300);

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [kind, path, columns, target, threads] = &words[..] else {
        return Err("usage: rate TYPE FILE COLUMNS TARGET THREADS".into());
    };
    let kind = GgmlType::all().find(|known| known.name() == kind).ok_or("no such type")?;
    let (bytes, columns) = (std::fs::read(path)?, columns.parse::<u64>()?);
    let elements = kind.row_elements(bytes.len() as u64).ok_or("no whole blocks")?;
    let tensor = TensorInfo {
        name: "layer.weight".into(),
        kind: TensorType::Ggml(kind),
        shape: vec![elements / columns, columns],
        file: 0,
        range: 0..bytes.len() as u64,
    };
    let weight = QuantWeight::ggml(&tensor)?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.parse()?).build()?;
    let elements = elements as usize;
    let (mut single, mut brain, mut half) = (Vec::new(), Vec::new(), Vec::new());
    match target.as_str() {
        "f32" => single.resize(elements, 0.0),
        "bf16" => brain.resize(elements, bf16::ZERO),
        "f16" => half.resize(elements, f16::ZERO),
        _ => return Err("the target is f32, bf16 or f16".into()),
    }
    let mut best = f64::INFINITY;
    let (begin, mut runs) = (Instant::now(), 0);
    while runs < 3 || begin.elapsed() < LONG_ENOUGH {
        let target = match target.as_str() {
            "f32" => Target::F32(&mut single),
            "bf16" => Target::Bf16(&mut brain),
            _ => Target::F16(&mut half),
        };
        let start = Instant::now();
        pool.install(|| dequantize(&weight, &("layer.weight", &bytes), 0..weight.rows()?, target))?;
        best = best.min(start.elapsed().as_secs_f64());
        runs += 1;
    }
    println!("{best}");
    Ok(())
}
