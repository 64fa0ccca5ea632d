//! INT8, rotated and not. Seen at <https://github.com/BobJohnson24/ComfyUI-INT8-Fast/pull/99>.

use quant_router::{QuantError, Transform};

use super::build::{File, format};

const LAYER: &str = "blocks.0.attn.qkv_proj";

fn layer(marker: &[u8]) -> File {
    File::default()
        .tensor(&format!("{LAYER}.weight"), "I8", &[96, 256])
        .tensor(&format!("{LAYER}.weight_scale"), "F32", &[96, 1])
        .marker(&format!("{LAYER}.comfy_quant"), marker)
}

fn transforms(file: &File) -> Vec<Transform> {
    let detection = file.detect().unwrap();
    let name = format!("{LAYER}.weight");
    assert_eq!(format(&detection, &name), "INT8 with a scale a row");
    detection.weights[&name].weight.transforms.clone()
}

#[test]
fn the_marker_says_whether_and_how_it_is_rotated() {
    let whole = br#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":256}"#;
    assert_eq!(transforms(&layer(whole)), [Transform::Hadamard { group: 256 }]);
    assert_eq!(
        transforms(&layer(br#"{"convrot":true,"convrot_groupsize":64}"#)),
        [Transform::Hadamard { group: 64 }]
    );
    assert_eq!(transforms(&layer(br#"{"convrot":true}"#)), [Transform::Hadamard { group: 256 }]);
    assert_eq!(transforms(&layer(br#"{"format":"int8_tensorwise"}"#)), []);
    let padded = [&whole[..], &[0; 9]].concat();
    assert_eq!(transforms(&layer(&padded)), [Transform::Hadamard { group: 256 }]);
}

#[test]
fn a_rotation_that_cannot_be_is_refused() {
    let weight = format!("{LAYER}.weight");
    for marker in [
        &br#"{"format":"int8_tensorwise","convrot":tr"#[..],
        br#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":128}"#,
        br#"{"convrot":true,"convrot_groupsize":1024}"#,
        br#"{"convrot":"yes"}"#,
        br#"{"convrot":true,"convrot_groupsize":-4}"#,
        br#"{"format":"nvfp4"}"#,
    ] {
        layer(marker).refused(&weight);
    }
    let narrow = File::default()
        .tensor("adaln_proj.weight", "I8", &[16, 8])
        .tensor("adaln_proj.weight_scale", "F32", &[16, 1])
        .marker("adaln_proj.comfy_quant", br#"{"format":"int8_tensorwise","convrot":true}"#);
    let error = narrow.refused("adaln_proj.weight");
    assert!(error.to_string().contains("its 8 columns"), "{error}");
}

#[test]
fn an_empty_marker_is_no_word_where_neighbours_are_rotated() {
    let neighbour = |file: File| {
        file.tensor("b.weight", "I8", &[8, 256])
            .tensor("b.weight_scale", "F32", &[8])
            .marker("b.comfy_quant", br#"{"format":"int8_tensorwise","convrot":true}"#)
    };
    assert_eq!(transforms(&layer(&[0; 20])), []);
    let error = neighbour(layer(&[0; 20])).refused(&format!("{LAYER}.weight"));
    assert!(error.to_string().contains("\"b.weight\" is rotated"), "{error}");
}

#[test]
fn other_scales_are_widened_and_said() {
    let file = File::default().tensor("a.weight", "I8", &[8, 4]).tensor("a.weight_scale", "BF16", &[8, 1]);
    let detection = file.detect().unwrap();
    assert_eq!(detection.notes.len(), 1);
    assert!(detection.notes[0].contains("widened to F32"));
}

#[test]
fn integers_without_a_scale_stay_integers_unless_the_file_says_otherwise() {
    let file = File::default().tensor("table.weight", "I8", &[8, 4]);
    assert!(file.detect().unwrap().plain.contains("table.weight"));
    let said = file.marker("table.comfy_quant", br#"{"format":"int8_tensorwise"}"#);
    assert!(matches!(said.refused("table.weight"), QuantError::Contradiction { .. }));
}
