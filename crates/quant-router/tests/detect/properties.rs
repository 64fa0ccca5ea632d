//! Random files of layers of all formats, against a model that knows what it wrote.

use proptest::prelude::*;

use super::build::{File, format};

/// A layer as it was written, and what must be made of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Layer {
    Plain,
    Table,
    Fp8Tensor,
    Fp8Row,
    Fp8Block,
    Int8,
    NvFp4,
    MxFp8,
}

const ALL: [Layer; 8] = [
    Layer::Plain,
    Layer::Table,
    Layer::Fp8Tensor,
    Layer::Fp8Row,
    Layer::Fp8Block,
    Layer::Int8,
    Layer::NvFp4,
    Layer::MxFp8,
];

fn write(file: File, name: &str, layer: Layer, named: bool) -> File {
    let of = |ending: &str| format!("{name}.{ending}");
    let (file, says) = match layer {
        Layer::Plain => (file.tensor(&of("weight"), "BF16", &[160, 64]), None),
        Layer::Table => (file.tensor(&of("weight"), "U8", &[160, 64]), None),
        Layer::Fp8Tensor => {
            let file = file.tensor(&of("weight"), "F8_E4M3", &[160, 64]);
            (
                file.tensor(&of("scale_weight"), "F32", &[]).tensor(&of("scale_input"), "F32", &[]),
                Some("float8_e4m3fn"),
            )
        }
        Layer::Fp8Row => {
            let file = file.tensor(&of("weight"), "F8_E5M2", &[160, 64]);
            (file.tensor(&of("weight_scale"), "F32", &[160, 1]), Some("float8_e5m2"))
        }
        Layer::Fp8Block => {
            let file = file.tensor(&of("weight"), "F8_E4M3", &[160, 64]);
            (file.tensor(&of("weight_scale_inv"), "F32", &[2, 1]), Some("float8_e4m3fn"))
        }
        Layer::Int8 => {
            let file = file.tensor(&of("weight"), "I8", &[160, 64]);
            (file.tensor(&of("weight_scale"), "F32", &[160]), Some("int8_tensorwise"))
        }
        Layer::NvFp4 => {
            let file = file.tensor(&of("weight"), "U8", &[160, 32]).tensor(
                &of("weight_scale"),
                "F8_E4M3",
                &[256, 4],
            );
            (file.tensor(&of("weight_scale_2"), "F32", &[]), Some("nvfp4"))
        }
        Layer::MxFp8 => {
            let file = file.tensor(&of("weight"), "F8_E4M3", &[160, 64]);
            (file.tensor(&of("weight_scale"), "U8", &[256, 4]), Some("mxfp8"))
        }
    };
    let file = file.tensor(&of("bias"), "BF16", &[160]);
    match says {
        Some(says) if named => {
            file.marker(&of("comfy_quant"), format!(r#"{{"format":"{says}"}}"#).as_bytes())
        }
        _ => file,
    }
}

fn want(layer: Layer) -> Option<&'static str> {
    match layer {
        Layer::Plain | Layer::Table => None,
        Layer::Fp8Tensor => Some("FP8 with one scale"),
        Layer::Fp8Row | Layer::Int8 if layer == Layer::Int8 => Some("INT8 with a scale a row"),
        Layer::Fp8Row | Layer::Int8 => Some("FP8 with a scale a row"),
        Layer::Fp8Block => Some("FP8 with a scale for 128 × 128"),
        Layer::NvFp4 => Some("NVFP4 with a scale for 1 × 16"),
        Layer::MxFp8 => Some("MXFP8 with a scale for 1 × 32"),
    }
}

proptest! {
    #[test]
    fn mixed_files_are_what_was_written(
        layers in prop::collection::vec((prop::sample::select(ALL.to_vec()), any::<bool>()), 0..12),
        prefix in prop::sample::select(vec!["", "model.diffusion_model.", "transformer."]),
    ) {
        let mut file = File::default();
        for (index, (layer, named)) in layers.iter().enumerate() {
            file = write(file, &format!("{prefix}blk.{index}.proj"), *layer, *named);
        }
        let detection = file.detect().unwrap();
        let quantized = layers.iter().filter(|(layer, _)| want(*layer).is_some()).count();
        prop_assert_eq!(detection.weights.len(), quantized);
        for (index, (layer, _)) in layers.iter().enumerate() {
            let name = format!("{prefix}blk.{index}.proj.weight");
            match want(*layer) {
                Some(want) => {
                    prop_assert_eq!(format(&detection, &name), want);
                    prop_assert_eq!(&detection.weights[&name].weight.shape, &[160, 64]);
                }
                None => prop_assert!(detection.plain.contains(&name)),
            }
        }
    }

    /// One FP8 layer that lost its scale among others: always an error that names it.
    #[test]
    fn a_lost_scale_is_always_found(
        layers in prop::collection::vec(prop::sample::select(vec![Layer::Fp8Tensor, Layer::Fp8Row, Layer::Plain]), 1..6),
        at in 0_usize..6,
    ) {
        prop_assume!(layers.iter().any(|layer| *layer != Layer::Plain));
        let mut file = File::default();
        for (index, layer) in layers.iter().enumerate() {
            file = write(file, &format!("blk.{index}"), *layer, false);
        }
        let lost = format!("blk.{at}.lost.weight");
        file.tensor(&lost, "F8_E4M3", &[8, 8]).refused(&lost);
    }
}
