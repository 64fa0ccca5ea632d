//! Integers of compressed-tensors: the shape that the file says decides how many bits they have.

use quant_router::{PartRole, QuantError};

use super::build::{File, format};

fn layer(packed: [u64; 2], scale: &[u64], shape: &[i64]) -> File {
    File::default()
        .tensor("a.weight_packed", "I32", &packed)
        .tensor("a.weight_scale", "BF16", scale)
        .numbers("a.weight_shape", shape)
        .tensor("a.bias", "F16", &[64])
}

#[test]
fn the_shape_says_how_many_bits() {
    for (width, bits) in [(8, 2), (12, 3), (16, 4), (32, 8)] {
        let detection = layer([64, width], &[64, 2], &[64, 128]).detect().unwrap();
        let words = format!("compressed-tensors in {bits} bits with a scale for 64");
        assert_eq!(format(&detection, "a.weight"), words);
        assert_eq!(detection.weights["a.weight"].weight.shape, [64, 128]);
        assert!(detection.hints.contains("a.weight_shape") && detection.plain.contains("a.bias"));
    }
    let zero =
        |shape: &[u64]| layer([33, 6], &[33, 1], &[33, 48]).tensor("a.weight_zero_point", "I32", shape);
    let detection = zero(&[5, 1]).tensor("a.input_global_scale", "F32", &[1]).detect().unwrap();
    let weight = &detection.weights["a.weight"].weight;
    assert_eq!(
        weight.format.to_string(),
        "compressed-tensors in 4 bits with a scale and a zero point for 48"
    );
    assert!(weight.part(PartRole::ZeroPoint).is_some() && detection.hints.contains("a.input_global_scale"));
    let ordered = layer([8, 8], &[8, 2], &[8, 64]).tensor("a.weight_g_idx", "I32", &[64]).detect().unwrap();
    assert!(format(&ordered, "a.weight").ends_with("in an order of its own"));
    for shape in [&[5, 2][..], &[4, 1], &[33, 1], &[5]] {
        zero(shape).refused("a.weight");
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let good = || layer([64, 16], &[64, 2], &[64, 128]);
    good().detect().unwrap();
    for (packed, scale, shape) in [
        ([64, 15], &[64, 2][..], &[64, 128][..]),
        ([63, 16], &[64, 2], &[64, 128]),
        ([64, 16], &[63, 2], &[64, 128]),
        ([64, 16], &[64, 0], &[64, 128]),
        ([64, 16], &[64, 127], &[64, 128]),
        ([64, 16], &[64], &[64, 128]),
        ([64, 16], &[64, 2], &[64, -128]),
        ([64, 16], &[64, 2], &[1, 64, 128]),
        ([64, 16], &[64, 2], &[64, i64::MAX]),
        ([64, 0], &[64, 1], &[64, 0]),
        // 8 columns in one word have 2, 3 or 4 bits.
        ([64, 1], &[64, 1], &[64, 8]),
    ] {
        layer(packed, scale, shape).refused("a.weight");
    }
    good().tensor("a.weight_g_idx", "I32", &[64]).refused("a.weight");
    good().tensor("a.weight_g_idx", "I64", &[128]).refused("a.weight");
    let bare = File::default().tensor("a.weight_packed", "I32", &[64, 16]);
    bare.refused("a.weight");
    let error = bare.tensor("a.weight_scale", "F16", &[64, 2]).refused("a.weight");
    assert!(matches!(error, QuantError::NotUnderstood { .. }), "{error}");
    // Claims are made without reading.
    let file = good();
    assert_eq!(file.claims(&quant_router::detect::Handlers::default())["a.weight"].0, "compressed-tensors");
}
