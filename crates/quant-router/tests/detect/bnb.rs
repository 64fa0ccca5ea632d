//! Files of bitsandbytes: what their descriptions say, and what is wrong with some.

use quant_router::QuantError;

use super::build::{File, format};

fn nf4(state: &str) -> File {
    File::default()
        .tensor("a.weight", "U8", &[64, 1])
        .tensor("a.weight.absmax", "F32", &[2])
        .tensor("a.weight.quant_map", "F32", &[16])
        .marker("a.weight.quant_state.bitsandbytes__nf4", state.as_bytes())
}

fn nested(state: &str) -> File {
    File::default()
        .tensor("a.weight", "U8", &[64, 1])
        .tensor("a.weight.absmax", "U8", &[2])
        .tensor("a.weight.quant_map", "F32", &[16])
        .tensor("a.weight.nested_absmax", "F32", &[1])
        .tensor("a.weight.nested_quant_map", "F32", &[256])
        .marker("a.weight.quant_state.bitsandbytes__nf4", state.as_bytes())
}

const PLAIN: &str = r#"{"quant_type":"nf4","blocksize":64,"dtype":"float16","shape":[8,16]}"#;
const NESTED: &str = r#"{"quant_type":"nf4","blocksize":64,"shape":[8,16],"nested_blocksize":256,"nested_dtype":"float32","nested_offset":0.044}"#;

#[test]
fn the_shape_is_the_described_one() {
    let detection = nf4(PLAIN).detect().unwrap();
    assert_eq!(format(&detection, "a.weight"), "bitsandbytes NF4 with a scale for 64");
    assert_eq!(detection.weights["a.weight"].weight.shape, [8, 16]);
    let detection = nested(NESTED).detect().unwrap();
    assert_eq!(format(&detection, "a.weight"), "bitsandbytes NF4 with a scale for 64, quantized itself");
}

#[test]
fn descriptions_that_do_not_fit_are_refused() {
    for state in [
        "",
        "{",
        "[]",
        "\u{0}",
        r#"{"quant_type":"fp4","blocksize":64,"shape":[8,16]}"#,
        r#"{"quant_type":"nf4","blocksize":0,"shape":[8,16]}"#,
        r#"{"quant_type":"nf4","blocksize":64,"shape":[8,18]}"#,
        r#"{"quant_type":"nf4","blocksize":32,"shape":[8,16]}"#,
        r#"{"quant_type":"nf4","blocksize":64,"shape":[9223372036854775807,16]}"#,
        r#"{"quant_type":"nf4","blocksize":64,"shape":[-8,-16]}"#,
        r#"{"quant_type":"nf4","blocksize":64}"#,
    ] {
        nf4(state).refused("a.weight");
    }
    for state in [
        PLAIN,
        r#"{"quant_type":"nf4","blocksize":64,"shape":[8,16],"nested_blocksize":0,"nested_offset":0.0}"#,
        r#"{"quant_type":"nf4","blocksize":64,"shape":[8,16],"nested_blocksize":1,"nested_offset":0.0}"#,
        r#"{"quant_type":"nf4","blocksize":64,"shape":[8,16],"nested_blocksize":256,"nested_dtype":"float16","nested_offset":0.0}"#,
    ] {
        nested(state).refused("a.weight");
    }
    let twice = nf4(PLAIN).marker("a.weight.quant_state.bitsandbytes__fp4", PLAIN.as_bytes());
    assert!(matches!(twice.refused("a.weight"), QuantError::NotUnderstood { .. }));
}

#[test]
fn row_wise_int8() {
    let layer = |rows: u64, layout: u8| {
        File::default()
            .tensor("a.weight", "I8", &[8, 16])
            .tensor("a.SCB", "F32", &[rows])
            .marker("a.weight_format", &[layout])
    };
    assert_eq!(format(&layer(8, 0).detect().unwrap(), "a.weight"), "bitsandbytes INT8 with a scale a row");
    layer(8, 2).refused("a.weight");
    layer(16, 0).refused("a.weight");
}
