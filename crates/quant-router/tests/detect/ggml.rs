//! Blocks of ggml in files that have no such types, and what recognises a weight without describing it.

use super::build::{File, format};

fn map(module: &str, kind: &str) -> String {
    format!("{{\"{module}\": {{\"weights\": \"{kind}\", \"activations\": \"none\"}}}}")
}

#[test]
fn bytes_are_blocks_where_the_map_names_their_type() {
    let file = File::default()
        .tensor("up.weight", "U8", &[3, 2 * 144])
        .tensor("table.weight", "U8", &[3, 2 * 144])
        .says("quantization_map", &map("up", "Q4_K"));
    let detection = file.detect().unwrap();
    assert_eq!(format(&detection, "up.weight"), "Q4_K");
    assert_eq!(detection.weights["up.weight"].weight.shape, [3, 512]);
    assert_eq!(detection.weights["up.weight"].handler, "gguf");
    // Bytes that nothing names are bytes.
    assert!(detection.plain.contains("table.weight"));
}

#[test]
fn bytes_that_are_no_whole_blocks_are_refused() {
    for shape in [&[3, 143][..], &[3, 2 * 144 + 1], &[]] {
        let file =
            File::default().tensor("up.weight", "U8", shape).says("quantization_map", &map("up", "Q4_K"));
        assert!(file.refused("up.weight").to_string().contains("rows of whole blocks of Q4_K"));
    }
    // A type that is no block, or of another kind of file, is what the map claims and tensors are not.
    for kind in ["F32", "Q9_Z"] {
        let file =
            File::default().tensor("up.weight", "U8", &[3, 144]).says("quantization_map", &map("up", kind));
        file.refused("up.weight");
    }
}
