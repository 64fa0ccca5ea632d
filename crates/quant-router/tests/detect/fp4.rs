//! NVFP4 and MXFP8, with and without anything that names them.

use quant_router::formats::{Codes, Order, Scales};
use quant_router::{Format, QuantError, Transform};

use super::build::{File, format};

/// A layer of NVFP4 without any metadata, beside plain ones. Seen at <https://github.com/Comfy-Org/ComfyUI/issues/15511>.
fn unnamed() -> File {
    File::default()
        .tensor("blk.0.attn1.to_q.weight", "U8", &[128, 32])
        .tensor("blk.0.attn1.to_q.weight_scale", "F8_E4M3", &[128, 4])
        .tensor("blk.0.attn1.to_q.weight_scale_2", "F32", &[])
        .tensor("blk.0.attn1.to_q.input_scale", "F32", &[])
        .tensor("blk.0.norm.weight", "BF16", &[64])
        .tensor("blk.0.relative_index.weight", "U8", &[64, 64])
}

#[test]
fn nvfp4_is_recognised_by_its_structure() {
    let detection = unnamed().detect().unwrap();
    assert_eq!(format(&detection, "blk.0.attn1.to_q.weight"), "NVFP4 with a scale for 1 × 16");
    assert_eq!(detection.weights["blk.0.attn1.to_q.weight"].weight.shape, [128, 64]);
    assert_eq!(detection.plain.len(), 2, "the norm, and bytes that are no weight");
    assert_eq!(detection.hints.len(), 1);
}

#[test]
fn nvfp4_that_cannot_be_understood_says_so() {
    let layer = || File::default().tensor("a.weight", "U8", &[96, 32]);
    let error = layer().tensor("a.weight_scale", "F8_E4M3", &[128, 4]).refused("a.weight");
    assert!(matches!(error, QuantError::NoScale { .. }) && error.to_string().contains("NVFP4"), "{error}");
    // Scales in rows, as other software writes them, with the halves of bytes the other way round.
    let rows = layer().tensor("a.weight_scale", "F8_E4M3", &[96, 4]).tensor("a.weight_scale_2", "F32", &[]);
    let error = rows.refused("a.weight");
    assert!(error.to_string().contains("NVFP4"), "{error}");
    let odd = File::default()
        .tensor("a.weight", "U8", &[128, 12])
        .tensor("a.weight_scale", "F8_E4M3", &[128, 4])
        .tensor("a.weight_scale_2", "F32", &[]);
    odd.refused("a.weight");
    let many = layer().tensor("a.weight_scale", "F8_E4M3", &[128, 4]).tensor("a.weight_scale_2", "F32", &[2]);
    many.refused("a.weight");
    // A second scale without a first one.
    File::default()
        .tensor("a.weight", "BF16", &[4, 4])
        .tensor("a.weight_scale_2", "F32", &[])
        .refused("a.weight");
}

#[test]
fn a_factor_of_inputs_is_a_transform() {
    let file = unnamed().tensor("blk.0.attn1.to_q.pre_quant_scale", "BF16", &[64]);
    let detection = file.detect().unwrap();
    assert_eq!(detection.weights["blk.0.attn1.to_q.weight"].weight.transforms, [Transform::Multiply]);
    unnamed().tensor("blk.0.attn1.to_q.pre_quant_scale", "BF16", &[32]).refused("blk.0.attn1.to_q.weight");
}

#[test]
fn mxfp8_needs_a_name_only_where_its_scales_could_be_either() {
    let layer = |rows: u64, scale: &[u64], dtype: &str| {
        let file = File::default().tensor("a.weight", "F8_E4M3", &[rows, 128]);
        file.tensor("a.weight_scale", dtype, scale)
    };
    let named = |file: File| file.marker("a.comfy_quant", br#"{"format": "mxfp8"}"#);
    for file in [
        named(layer(128, &[128, 4], "U8")),
        named(layer(100, &[128, 4], "F8_E8M0")),
        layer(100, &[128, 4], "U8"),
        layer(100, &[100, 4], "F8_E8M0"),
    ] {
        assert_eq!(format(&file.detect().unwrap(), "a.weight"), "MXFP8 with a scale for 1 × 32");
    }
    let error = layer(128, &[128, 4], "U8").refused("a.weight");
    assert!(error.to_string().contains("may be in tiles or in rows"), "{error}");
    named(layer(100, &[100, 4], "U8")).refused("a.weight");
    layer(100, &[100, 3], "U8").refused("a.weight");
}

/// A layer as `ModelOpt` writes it: its shapes are those of whole tiles, too.
fn in_rows() -> File {
    File::default()
        .tensor("a.weight", "U8", &[128, 32])
        .tensor("a.weight_scale", "F8_E4M3", &[128, 4])
        .tensor("a.weight_scale_2", "F32", &[])
        .tensor("a.input_scale", "F32", &[])
}

#[test]
fn scales_in_rows_are_understood_where_something_says_so() {
    let codes = |file: File| match file.detect().unwrap().weights["a.weight"].weight.format {
        Format::Scaled(scaled) => (scaled.codes, scaled.scales),
        ref other => panic!("{other}"),
    };
    let scales = |order| Scales::Blocks { rows: 1, columns: 16, order };
    assert_eq!(codes(in_rows()), (Codes::E2m1High, scales(Order::Swizzled)));
    let rows = (Codes::E2m1Low, scales(Order::Rows));
    let says = r#"{"quant_method": "modelopt", "quant_algo": "NVFP4"}"#;
    assert_eq!(codes(in_rows().says("quantization_config", says)), rows);
    let config = format!(r#"{{"architectures": [], "quantization_config": {says}}}"#);
    assert_eq!(codes(in_rows().says("config", &config)), rows);
    assert_eq!(codes(in_rows().says("config", "a remark")), (Codes::E2m1High, scales(Order::Swizzled)));
    let error = in_rows().says("quantization_config", "no JSON").detect().unwrap_err();
    assert!(matches!(error, QuantError::Marker { .. }), "{error}");
}

#[test]
fn compressed_tensors_name_their_packing() {
    let packed = || File::default().tensor("a.weight_packed", "U8", &[128, 32]);
    let scaled = || packed().tensor("a.weight_scale", "F8_E4M3", &[128, 4]);
    let file =
        scaled().tensor("a.weight_global_scale", "F32", &[1]).tensor("a.input_global_scale", "F32", &[1]);
    let detection = file.detect().unwrap();
    assert_eq!(format(&detection, "a.weight"), "NVFP4 with a scale for 1 × 16");
    assert!(detection.hints.contains("a.input_global_scale") && detection.plain.is_empty());
    scaled().refused("a.weight");
    packed().refused("a.weight");
    let tiles = packed().tensor("a.weight_scale", "F8_E4M3", &[128, 8]);
    tiles.tensor("a.weight_global_scale", "F32", &[1]).refused("a.weight");
}
