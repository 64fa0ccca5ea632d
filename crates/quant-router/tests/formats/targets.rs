//! Parts of weights, and the other targets: any rows are those of the whole, in every precision.

use half::{bf16, f16};
use quant_router::{PartRole, QuantError, Target, dequantize};

use super::{corpus, open};

/// The files whose weights are looked at.
const FILES: [&str; 8] = ["fp8", "int8", "nvfp4", "mxfp8", "bnb", "quanto", "torchao", "w4a8"];

#[test]
fn rows_are_those_of_the_whole_in_every_precision() {
    for name in FILES {
        let file = open(&corpus().join(format!("{name}.safetensors")));
        for found in file.detection.weights.values() {
            let weight = &found.weight;
            let (rows, columns) = (weight.rows().unwrap(), weight.columns());
            let mut whole = vec![0.0; (rows * columns) as usize];
            dequantize(weight, &file.bytes, 0..rows, Target::F32(&mut whole)).unwrap();
            for (start, end) in [(0, 1), (rows / 2, rows), (rows - 1, rows), (rows, rows)] {
                let want = &whole[(start * columns) as usize..(end * columns) as usize];
                let mut single = vec![0.0; want.len()];
                dequantize(weight, &file.bytes, start..end, Target::F32(&mut single)).unwrap();
                let bits = |numbers: &[f32]| numbers.iter().map(|n| n.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&single), bits(want));
                let mut brain = vec![bf16::ZERO; want.len()];
                dequantize(weight, &file.bytes, start..end, Target::Bf16(&mut brain)).unwrap();
                let mut half = vec![f16::ZERO; want.len()];
                dequantize(weight, &file.bytes, start..end, Target::F16(&mut half)).unwrap();
                for (at, &want) in want.iter().enumerate() {
                    let brain = brain[at];
                    assert!(brain == bf16::from_f32(want) || brain.is_nan() && want.is_nan());
                    assert!(half[at] == f16::from_f32(want) || half[at].is_nan() && want.is_nan());
                }
            }
        }
    }
}

#[test]
fn parts_of_another_size_are_refused_by_name() {
    for name in FILES {
        let file = open(&corpus().join(format!("{name}.safetensors")));
        for found in file.detection.weights.values() {
            let weight = &found.weight;
            let mut out = vec![0.0; weight.elements().unwrap() as usize];
            for part in &weight.parts {
                let mut cut = file.bytes.clone();
                cut.get_mut(&part.tensor).unwrap().pop();
                let error = dequantize(weight, &cut, 0..weight.rows().unwrap(), Target::F32(&mut out));
                // Factors of inputs are not read here.
                if part.role == PartRole::InputFactor {
                    assert!(error.is_ok());
                } else {
                    let error = error.unwrap_err();
                    assert!(matches!(error, QuantError::PartSize { .. }), "{error}");
                    assert!(error.to_string().contains(&part.tensor), "{error}");
                }
            }
        }
    }
}
