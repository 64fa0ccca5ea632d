//! Scaled FP8 in all spellings, and FP8 that is not scaled.

use quant_router::{PartRole, QuantError};

use super::build::{File, format};

const PREFIX: &str = "model.diffusion_model.blk";

/// A scaled file with a layer in each spelling.
fn scaled() -> File {
    File::default()
        .tensor("scaled_fp8", "F8_E4M3", &[0])
        .tensor(&format!("{PREFIX}.0.to_k.weight"), "F8_E4M3", &[32, 32])
        .tensor(&format!("{PREFIX}.0.to_k.weight_scale"), "F32", &[])
        .tensor(&format!("{PREFIX}.0.to_k.input_scale"), "F32", &[])
        .tensor(&format!("{PREFIX}.1.to_k.weight"), "F8_E4M3", &[32, 32])
        .tensor(&format!("{PREFIX}.1.to_k.scale_weight"), "F32", &[1])
        .tensor(&format!("{PREFIX}.1.to_k.scale_input"), "F32", &[1])
        .tensor(&format!("{PREFIX}.1.norm.weight"), "BF16", &[32])
}

#[test]
fn both_spellings_scale_and_input_scales_do_not() {
    let detection = scaled().detect().unwrap();
    assert_eq!(detection.weights.len(), 2);
    for (name, found) in &detection.weights {
        assert_eq!(format(&detection, name), "FP8 with one scale");
        assert_eq!(found.weight.shape, [32, 32]);
        assert_eq!(found.handler, "fp8");
        let roles: Vec<_> = found.weight.parts.iter().map(|part| part.role).collect();
        assert_eq!(roles, [PartRole::Data, PartRole::Scale]);
    }
    assert_eq!(detection.hints.len(), 3, "the marker and the input scales: {:?}", detection.hints);
    assert_eq!(detection.plain.len(), 1);
}

#[test]
fn fp8_without_a_scale_is_refused_where_anything_says_that_it_is_scaled() {
    let third = format!("{PREFIX}.2.to_k.weight");
    let error = scaled().tensor(&third, "F8_E4M3", &[32, 32]).refused(&third);
    assert!(matches!(error, QuantError::NoScale { .. }));
    // The marker alone, or a sibling's scale alone, is enough.
    let marked = File::default().tensor("scaled_fp8", "F8_E5M2", &[0]).tensor(&third, "F8_E5M2", &[4, 4]);
    marked.refused(&third);
    let siblings = File::default()
        .tensor("a.weight", "F8_E4M3", &[4, 4])
        .tensor("a.scale_weight", "F32", &[])
        .tensor(&third, "F8_E4M3", &[4, 4]);
    siblings.refused(&third);
    // A convolution and an embedding are no different.
    scaled().tensor("conv.weight", "F8_E4M3", &[8, 4, 3, 3]).refused("conv.weight");
}

#[test]
fn fp8_in_a_file_without_scales_is_what_it_is() {
    let file = File::default().tensor("a.weight", "F8_E4M3", &[4, 4]).tensor("a.bias", "F8_E4M3", &[4]);
    let detection = file.detect().unwrap();
    assert_eq!(format(&detection, "a.weight"), "FP8 without scales");
    assert_eq!(format(&detection, "a.bias"), "FP8 without scales");
}

#[test]
fn two_spellings_on_one_layer_must_agree() {
    let layer = |first: f32, second: f32| {
        File::default().tensor("a.weight", "F8_E4M3", &[4, 4]).scale("a.weight_scale", &[], first).scale(
            "a.scale_weight",
            &[1],
            second,
        )
    };
    let detection = layer(0.5, 0.5).detect().unwrap();
    assert_eq!(format(&detection, "a.weight"), "FP8 with one scale");
    assert_eq!(detection.hints.len(), 1);
    let error = layer(0.5, 0.25).refused("a.weight");
    assert!(matches!(error, QuantError::ScalesDiffer { .. }));
}

#[test]
fn scales_of_every_shape() {
    let layer = |shape: &[u64], scale: &[u64]| {
        let file = File::default().tensor("a.weight", "F8_E4M3", shape);
        file.tensor("a.weight_scale_inv", "F32", scale).detect().map(|found| format(&found, "a.weight"))
    };
    for (shape, scale, want) in [
        (&[300, 200][..], &[][..], "FP8 with one scale"),
        (&[300, 200], &[1, 1], "FP8 with one scale"),
        (&[300, 200], &[300], "FP8 with a scale a row"),
        (&[300, 200], &[300, 1], "FP8 with a scale a row"),
        (&[300, 200], &[3, 2], "FP8 with a scale for 128 × 128"),
        (&[300, 200], &[300, 25], "FP8 with a scale for 1 × 8"),
        (&[8, 4, 3, 3], &[8, 1, 1, 1], "FP8 with a scale a row"),
        (&[16, 8, 4], &[16, 1, 1], "FP8 with a scale a row"),
        (&[7], &[1], "FP8 with one scale"),
    ] {
        assert_eq!(layer(shape, scale).unwrap(), want, "{shape:?} {scale:?}");
    }
    for (shape, scale) in [
        (&[300, 200][..], &[200][..]),
        (&[300, 200], &[1, 200, 1]),
        (&[300, 200], &[7, 2]),
        (&[300, 200], &[0]),
        (&[8, 4, 3, 3], &[8, 4, 1, 1]),
        (&[7], &[7]),
    ] {
        let error = layer(shape, scale).unwrap_err();
        assert!(matches!(error, QuantError::PartKind { .. }), "{shape:?} {scale:?}: {error}");
    }
    let odd = File::default().tensor("a.weight", "F8_E4M3", &[4, 4]).tensor("a.weight_scale", "I32", &[]);
    odd.refused("a.weight");
}

#[test]
fn parameters_that_are_no_weights_are_scaled_too() {
    let file = File::default().tensor("mlp.experts.gate_up_proj", "F8_E4M3", &[256, 128]).tensor(
        "mlp.experts.gate_up_proj_scale_inv",
        "F32",
        &[2, 1],
    );
    let detection = file.detect().unwrap();
    assert_eq!(format(&detection, "mlp.experts.gate_up_proj"), "FP8 with a scale for 128 × 128");
}

#[test]
fn a_marker_names_the_block() {
    let layer = |marker: &str, dtype: &str, scale: &[u64]| {
        let file =
            File::default().tensor("a.weight", dtype, &[128, 192]).tensor("a.weight_scale", "F32", scale);
        file.marker("a.comfy_quant", marker.as_bytes())
    };
    for (marker, dtype, scale, want) in [
        (
            r#"{"format":"float8_e4m3fn_blockwise","group_size":64}"#,
            "F8_E4M3",
            [2, 3],
            "FP8 with a scale for 64 × 64",
        ),
        (
            r#"{"format":"float8_e4m3fn_blockwise","group_size":32}"#,
            "F8_E4M3",
            [128, 6],
            "FP8 with a scale for 1 × 32",
        ),
        (r#"{"format":"float8_e4m3fn_rowwise"}"#, "F8_E4M3", [128, 1], "FP8 with a scale a row"),
        (r#"{"format":"int8_blockwise","group_size":128}"#, "I8", [1, 2], "INT8 with a scale for 128 × 128"),
    ] {
        assert_eq!(format(&layer(marker, dtype, &scale).detect().unwrap(), "a.weight"), want);
    }
    layer(r#"{"format":"float8_e4m3fn_blockwise","group_size":32}"#, "F8_E4M3", &[2, 3]).refused("a.weight");
    layer(r#"{"format":"float8_e4m3fn_blockwise","group_size":0}"#, "F8_E4M3", &[2, 3]).refused("a.weight");
}

#[test]
fn matrices_below_each_other_have_blocks_of_their_own() {
    let file = |shape: &[u64], scale: &[u64]| {
        File::default().tensor("a.weight", "F8_E4M3", shape).tensor("a.weight_scale", "F32", scale)
    };
    for (shape, scale, words) in [
        ([2, 256, 130], [2, 2, 2], "for 128 × 128"),
        ([3, 5, 8], [3, 5, 1], "for 1 × 8"),
        ([3, 8, 12], [3, 2, 3], "for 4 × 4"),
        ([3, 5, 8], [3, 1, 1], "a row"),
    ] {
        let detection = file(&shape, &scale).detect().unwrap();
        let found = format(&detection, "a.weight");
        assert!(found.ends_with(words), "{found}");
        assert_eq!(detection.weights["a.weight"].weight.shape, shape);
    }
    // Blocks that would reach into the next matrix, scales of another number of matrices, and scales of nothing.
    for (shape, scale) in [
        ([2, 130, 130], [2, 2, 2]),
        ([3, 8, 12], [2, 2, 3]),
        ([3, 8, 12], [3, 3, 3]),
        ([3, 8, 12], [3, 0, 3]),
    ] {
        file(&shape, &scale).refused("a.weight");
    }
}
