//! Files of torchao: what the metadata says, and tensors that it does not fit.

use super::build::{File, format};

fn int8(class: &str) -> File {
    File::default()
        .tensor("0._weight_qdata", "I8", &[6, 64])
        .tensor("0._weight_scale", "F32", &[6, 2])
        .tensor("0._weight_zero_point", "I8", &[6, 2])
        .tensor("0.bias", "BF16", &[6])
        .says("tensor_names", r#"["0.weight", "0.bias"]"#)
        .says("0.bias", r#"{"_type": "Tensor"}"#)
        .says("0.weight", class)
}

#[test]
fn the_metadata_says_what_parts_and_blocks_there_are() {
    let file = int8(
        r#"{"_type":"Int8Tensor","_data":{"block_size":[1,32]},"_tensor_data_names":["zero_point","qdata","scale"]}"#,
    );
    let detection = file.detect().unwrap();
    assert_eq!(format(&detection, "0.weight"), "torchao with a scale for 1 × 32");
    assert_eq!(detection.weights["0.weight"].weight.parts.len(), 3);
    assert_eq!(detection.plain.len(), 1);
}

#[test]
fn what_does_not_fit_is_refused() {
    for class in [
        "",
        "{",
        "[]",
        r#"{"_type":"Int4TilePackedTo4dTensor","_data":{},"_tensor_data_names":["qdata"]}"#,
        r#"{"_type":"Float8Tensor","_data":{"block_size":[1,32]},"_tensor_data_names":["zero_point","qdata","scale"]}"#,
        r#"{"_type":"Int8Tensor","_data":{"block_size":[1,16]},"_tensor_data_names":["zero_point","qdata","scale"]}"#,
        r#"{"_type":"Int8Tensor","_data":{"block_size":[1,0]},"_tensor_data_names":["zero_point","qdata","scale"]}"#,
        r#"{"_type":"Int8Tensor","_data":{"block_size":"all"},"_tensor_data_names":["zero_point","qdata","scale"]}"#,
        r#"{"_type":"Int8Tensor","_data":{"block_size":[1,32]},"_tensor_data_names":["qdata","scale","secret"]}"#,
        r#"{"_type":"Int8Tensor","_data":{"block_size":[1,32]},"_tensor_data_names":["qdata","scale","act_pre_scale"]}"#,
    ] {
        int8(class).refused("0.weight");
    }
    File::default().tensor("0._weight_qdata", "F8_E4M3", &[6, 64]).refused("0.weight");
    let lost =
        File::default().tensor("0.weight", "BF16", &[6, 64]).says("0.weight", r#"{"_type":"Int8Tensor"}"#);
    lost.refused("0.weight");
}
