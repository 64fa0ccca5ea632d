//! W4A8: groups, rotations, and what only the file can say.

use quant_router::Transform;

use super::build::{File, format};

fn layer(marker: &str) -> File {
    File::default()
        .tensor("a.weight", "I8", &[8, 128])
        .tensor("a.weight_s_rel", "F8_E4M3", &[8, 16])
        .tensor("a.weight_s_channel", "F32", &[8])
        .marker("a.comfy_quant", marker.as_bytes())
}

#[test]
fn groups_come_from_shapes_and_the_rotation_from_the_marker() {
    for (marker, group) in [
        (r#"{"format":"asym_w4a8_int8"}"#, 256),
        (r#"{"format":"w4a8_int8","group_size":16,"convrot":true,"convrot_groupsize":64}"#, 64),
    ] {
        let detection = layer(marker).detect().unwrap();
        assert_eq!(format(&detection, "a.weight"), "W4A8 with a scale for 16");
        let weight = &detection.weights["a.weight"].weight;
        assert_eq!(
            (&weight.shape[..], &weight.transforms[..]),
            (&[8, 256][..], &[Transform::Hadamard { group }][..])
        );
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    for marker in [
        "",
        "{}",
        r#"{"format":"int8_tensorwise"}"#,
        r#"{"format":"w4a8_int8","group_size":32}"#,
        r#"{"format":"w4a8_int8","convrot_groupsize":128}"#,
        r#"{"format":"w4a8_int8","convrot_groupsize":1024}"#,
    ] {
        layer(marker).refused("a.weight");
    }
    let marker = r#"{"format":"w4a8_int8"}"#;
    layer(marker).tensor("a.weight_codebook", "F32", &[15]).refused("a.weight");
    layer(marker).tensor("a.weight_correction", "F32", &[8, 16]).refused("a.weight");
    layer(marker).tensor("a.weight_correction", "F32", &[16, 8]).detect().unwrap();
}
