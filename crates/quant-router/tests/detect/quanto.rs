//! Files of optimum-quanto and mmgp, with and without their map.

use quant_router::QuantError;

use super::build::{File, format};

fn with_map(file: File, kind: &str) -> File {
    file.says("quantization_map", &format!(r#"{{"a": {{"weights": "{kind}", "activations": "none"}}}}"#))
}

fn qint8() -> File {
    File::default()
        .tensor("a.weight._data", "I8", &[8, 16])
        .tensor("a.weight._scale", "BF16", &[8, 1])
        .tensor("a.input_scale", "F32", &[])
        .tensor("a.output_scale", "F32", &[])
        .tensor("a.bias", "BF16", &[8])
}

fn bits(groups: u64, rows: u64) -> File {
    File::default()
        .tensor("a.weight._data._data", "U8", &[rows, 32])
        .tensor("a.weight._scale", "BF16", &[groups, 1])
        .tensor("a.weight._shift", "BF16", &[groups, 1])
}

#[test]
fn bytes_are_recognised_with_and_without_the_map() {
    for file in [qint8(), with_map(qint8(), "qint8")] {
        let detection = file.detect().unwrap();
        assert_eq!(format(&detection, "a.weight"), "quanto qint8 with a scale a row");
        assert_eq!(detection.hints.len(), 2);
        assert_eq!(detection.plain.len(), 1);
    }
    assert!(matches!(with_map(qint8(), "qfloat8").refused("a.weight"), QuantError::Contradiction { .. }));
}

#[test]
fn the_map_decides_where_shapes_do_not() {
    let detection = bits(20, 10).detect().unwrap();
    assert_eq!(format(&detection, "a.weight"), "quanto qint4 with a scale and a shift for 32");
    let found = &detection.weights["a.weight"].weight;
    assert_eq!(found.shape, [20, 32]);
    assert_eq!(detection.notes.len(), 1);
    assert_eq!(found.clone().with_shape(&[10, 64]).unwrap().shape, [10, 64]);
    assert!(found.clone().with_shape(&[10, 63]).is_err());
    assert_eq!(
        format(&bits(20, 5).detect().unwrap(), "a.weight"),
        "quanto qint2 with a scale and a shift for 32"
    );
    bits(20, 7).refused("a.weight");
    bits(1, 1).refused("a.weight");
    for kind in ["qint2", "qint4"] {
        assert!(format(&with_map(bits(1, 1), kind).detect().unwrap(), "a.weight").contains(kind));
    }
    with_map(bits(20, 10), "qint2").refused("a.weight");
    with_map(bits(20, 10), "qint8").refused("a.weight");
    let known = bits(20, 10).tensor("a.bias", "F32", &[10]).detect().unwrap();
    assert_eq!(known.weights["a.weight"].weight.shape, [10, 64]);
}

#[test]
fn what_the_map_names_must_be_there() {
    let file = with_map(File::default().tensor("a.weight", "BF16", &[8, 16]), "qint8");
    assert!(matches!(file.refused("a.weight"), QuantError::Contradiction { .. }));
    let lost = with_map(File::default().tensor("a.weight._data", "I8", &[8, 16]), "qint8");
    lost.refused("a.weight");
    File::default().tensor("a.weight._data", "I8", &[8, 16]).refused("a.weight");
    for map in ["", "[]", r#"{"a": {"weights": 8}}"#] {
        qint8().says("quantization_map", map).refused("*");
    }
    qint8().says("quantization_map_base64", "%").refused("*");
}
