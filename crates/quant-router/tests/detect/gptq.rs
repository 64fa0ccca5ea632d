//! GPTQ and AWQ: told apart by their shapes, and refused where those fit neither.

use quant_router::QuantError;

use super::build::{File, format};

fn layer(qweight: [u64; 2], qzeros: [u64; 2], scales: [u64; 2]) -> File {
    File::default()
        .tensor("a.qweight", "I32", &qweight)
        .tensor("a.qzeros", "I32", &qzeros)
        .tensor("a.scales", "F16", &scales)
        .tensor("a.bias", "F16", &[64])
}

#[test]
fn shapes_say_which_it_is() {
    let gptq = || layer([16, 64], [2, 8], [2, 64]);
    let detection = gptq().tensor("a.g_idx", "I32", &[128]).detect().unwrap();
    let words = "GPTQ in 4 bits with a scale and a zero point for 64 in an order of its own";
    assert_eq!(format(&detection, "a.weight"), words);
    assert_eq!(detection.weights["a.weight"].weight.shape, [64, 128]);
    assert_eq!(detection.plain.len(), 1);
    let words = format(&gptq().detect().unwrap(), "a.weight");
    assert_eq!(words, "GPTQ in 4 bits with a scale and a zero point for 64");
    let eight = layer([16, 64], [1, 16], [1, 64]).detect().unwrap();
    assert_eq!(format(&eight, "a.weight"), "GPTQ in 8 bits with a scale and a zero point for 64");
    let three = layer([12, 64], [2, 6], [2, 64]).detect().unwrap();
    assert_eq!(format(&three, "a.weight"), "GPTQ in 3 bits with a scale and a zero point for 64");
    assert_eq!(three.weights["a.weight"].weight.shape, [64, 128]);
    let awq = || layer([128, 8], [2, 8], [2, 64]);
    let detection = awq().detect().unwrap();
    assert_eq!(format(&detection, "a.weight"), "AWQ in 4 bits with a scale and a zero point for 64");
    assert_eq!(detection.weights["a.weight"].weight.shape, [64, 128]);

    let says = |file: File, method: &str| {
        file.says("quantization_config", &format!(r#"{{"quant_method": "{method}"}}"#))
    };
    for (file, method) in [(gptq(), "gptq"), (awq(), "awq"), (awq(), "AWQ"), (gptq(), "other")] {
        says(file, method).detect().unwrap();
    }
    for (file, method) in [(gptq(), "awq"), (awq(), "gptq")] {
        let error = says(file, method).refused("a.weight");
        assert!(matches!(error, QuantError::Contradiction { .. }), "{error}");
    }
}

#[test]
fn settings_that_the_shapes_contradict_are_refused_and_tell_the_size_of_a_cut_group() {
    let gptq = || layer([16, 64], [2, 8], [2, 64]);
    let says = |file: File, settings: &str| file.says("quantization_config", &format!("{{{settings}}}"));
    for settings in [
        r#""bits": 4, "group_size": 64, "checkpoint_format": "gptq_v2""#,
        r#""bits": 4, "group_size": 64, "quant_method": "GPTQ", "checkpoint_format": "gptq""#,
        r#""w_bit": 4, "q_group_size": 64"#,
        r#""bits": 8, "group_size": 32, "dynamic": {"a": {"bits": 4}}"#,
        r#""bits": null"#,
    ] {
        says(gptq(), settings).detect().unwrap();
    }
    for settings in [
        r#""bits": 8"#,
        r#""bits": "many""#,
        r#""w_bit": 3"#,
        r#""group_size": 32"#,
        r#""group_size": -1"#,
        r#""group_size": -2"#,
        r#""group_size": 0"#,
        r#""q_group_size": 1e300"#,
        r#""checkpoint_format": "marlin""#,
    ] {
        let error = says(gptq(), settings).refused("a.weight");
        assert!(matches!(error, QuantError::Contradiction { .. }), "{settings}: {error}");
    }
    // 16 columns in groups of 7 end in one of 2, which shapes alone would take for groups of 6.
    let cut = says(layer([2, 64], [3, 8], [3, 64]), r#""bits": 4, "group_size": 7"#).detect().unwrap();
    assert_eq!(format(&cut, "a.weight"), "GPTQ in 4 bits with a scale and a zero point for 7");
    let one = says(layer([16, 64], [1, 8], [1, 64]), r#""group_size": -1"#).detect().unwrap();
    assert_eq!(format(&one, "a.weight"), "GPTQ in 4 bits with a scale and a zero point for 128");
}

#[test]
fn what_fits_neither_is_refused() {
    // Words of 3 bits that no whole numbers fill, zero points of other groups, words of rows in another number of bits, as many columns as no words hold.
    for (qweight, qzeros, scales) in [
        ([13, 64], [2, 6], [2, 64]),
        ([12, 64], [2, 7], [2, 64]),
        ([16, 64], [3, 8], [2, 64]),
        ([128, 16], [2, 16], [2, 64]),
        ([64, 16], [16, 2], [2, 64]),
        ([16, 63], [2, 8], [2, 64]),
        ([0, 64], [2, 8], [2, 64]),
        ([2, 64], [3, 8], [3, 64]),
        ([16, 0], [2, 0], [2, 0]),
    ] {
        let file = layer(qweight, qzeros, scales);
        if qweight == [2, 64] {
            file.detect().unwrap(); // 16 columns in 3 groups of 6: the last is cut
        } else {
            file.refused("a.weight");
        }
    }
    let gptq = || layer([16, 64], [2, 8], [2, 64]);
    gptq().tensor("a.g_idx", "I32", &[64]).refused("a.weight");
    gptq().tensor("a.g_idx", "I64", &[128]).refused("a.weight");
    File::default()
        .tensor("a.qweight", "I32", &[16, 64])
        .tensor("a.scales", "F16", &[2, 64])
        .refused("a.weight");
}
