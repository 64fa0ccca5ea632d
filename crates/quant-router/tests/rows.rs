//! Ranges of rows and refusals: any rows of a weight are the same numbers as in the whole, whatever does not fit is an error
//! that says so, and then nothing was written.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeMap;

use checkpoint::gguf::GgmlType;
use checkpoint::{TensorInfo, TensorType};
use common::ggml;
use half::{bf16, f16};
use proptest::prelude::*;
use quant_router::formats::{PackedInt, Words};
use quant_router::{Format, Part, PartRole, QuantError, QuantWeight, Target, check, dequantize};

/// Bytes without order: a linear congruential generator.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let next = std::iter::repeat_with(|| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    });
    next.take(length).collect()
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| if number.is_nan() { 0x7fc0_0000 } else { number.to_bits() }).collect()
}

fn quantized() -> Vec<GgmlType> {
    GgmlType::all().filter(|kind| kind.is_quantized()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Rows need not hold whole blocks: converters flatten convolutions.
    #[test]
    fn any_rows_are_those_of_the_whole(
        kind in proptest::sample::select(quantized()), rows in 1_u64..400, blocks in 1_u64..5, split in 1_u64..64,
        ends: (u16, u16),
    ) {
        // As many elements as whole blocks, in rows of a part of a block where that divides.
        let elements = rows * blocks * kind.block_elements();
        let columns = if elements.is_multiple_of(split) { elements / rows.min(elements) / split } else { 0 };
        let columns = if columns > 0 && elements.is_multiple_of(columns) { columns } else { blocks * kind.block_elements() };
        let rows = elements / columns;
        let weight = ggml(kind, &[rows, columns]);
        let bytes = noise((elements / kind.block_elements() * kind.block_bytes()) as usize);
        let parts = ("layer.weight", &bytes);
        let mut whole = vec![0.0; elements as usize];
        dequantize(&weight, &parts, 0..rows, Target::F32(&mut whole)).unwrap();

        let (a, b) = (u64::from(ends.0) % (rows + 1), u64::from(ends.1) % (rows + 1));
        let range = a.min(b)..a.max(b);
        let expected = &whole[(range.start * columns) as usize..(range.end * columns) as usize];
        let mut some = vec![0.0; expected.len()];
        dequantize(&weight, &parts, range.clone(), Target::F32(&mut some)).unwrap();
        prop_assert_eq!(bits(&some), bits(expected));

        let (mut brain, mut half) = (vec![bf16::ONE; expected.len()], vec![f16::ONE; expected.len()]);
        dequantize(&weight, &parts, range.clone(), Target::Bf16(&mut brain)).unwrap();
        dequantize(&weight, &parts, range, Target::F16(&mut half)).unwrap();
        for ((exact, brain), half) in expected.iter().zip(brain).zip(half) {
            prop_assert!(exact.is_nan() && brain.is_nan() || brain == bf16::from_f32(*exact));
            prop_assert!(exact.is_nan() && half.is_nan() || half == f16::from_f32(*exact));
        }
    }
}

#[test]
fn more_elements_than_a_piece_are_decoded_by_all_threads() {
    let kind = GgmlType::Q4_K;
    let (rows, columns) = (700, 1024);
    let bytes = noise((rows * kind.row_bytes(columns).unwrap()) as usize);
    let weight = ggml(kind, &[rows, columns]);
    let decode = |threads, range: std::ops::Range<u64>| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut out = vec![0.0; ((range.end - range.start) * columns) as usize];
        pool.install(|| dequantize(&weight, &("layer.weight", &bytes), range, Target::F32(&mut out)))
            .unwrap();
        bits(&out)
    };
    let whole = decode(1, 0..rows);
    assert_eq!(whole, decode(5, 0..rows));
    assert_eq!(whole[3 * 1024..650 * 1024], decode(3, 3..650));
}

#[test]
fn shapes_of_any_rank_and_without_elements_are_decoded() {
    let bytes = noise(2 * 34);
    let mut out = [0.0; 64];
    for shape in [&[64][..], &[2, 32], &[1, 2, 32], &[4, 2, 2, 4], &[64, 1]] {
        let weight = ggml(GgmlType::Q8_0, shape);
        let rows = weight.rows().unwrap();
        dequantize(&weight, &("layer.weight", &bytes), 0..rows, Target::F32(&mut out)).unwrap();
    }
    for shape in [&[0][..], &[0, 32], &[3, 0], &[u64::MAX, 0]] {
        let weight = ggml(GgmlType::Q8_0, shape);
        let rows = weight.rows().unwrap();
        dequantize(&weight, &("layer.weight", &[]), 0..rows, Target::F32(&mut [])).unwrap();
    }
}

fn refused(shape: &[u64], bytes: &[u8], rows: std::ops::Range<u64>, numbers: usize) -> QuantError {
    let mut out = vec![1234.5; numbers];
    let weight = ggml(GgmlType::Q4_K, shape);
    let error = dequantize(&weight, &("layer.weight", bytes), rows, Target::F32(&mut out)).unwrap_err();
    assert!(out.iter().all(|number| number.to_bits() == 1234.5_f32.to_bits()), "written in spite of {error}");
    error
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_written() {
    let bytes = noise(2 * 144);
    let text = |error: QuantError| error.to_string();
    assert_eq!(
        text(refused(&[2, 256], &bytes[..287], 0..1, 256)),
        "the packed data of \"layer.weight\" has 287 bytes and needs 288: it is the tensor \"layer.weight\""
    );
    assert!(matches!(refused(&[2, 256], &noise(289), 0..1, 256), QuantError::PartSize { have: 289, .. }));
    assert!(matches!(refused(&[2, 256], &[], 0..1, 256), QuantError::PartSize { have: 0, need: 288, .. }));
    assert_eq!(
        text(refused(&[2, 256], &bytes, 1..3, 512)),
        "rows 1..3 of \"layer.weight\" were asked for, which has 2"
    );
    #[expect(clippy::reversed_empty_ranges, reason = "what is refused")]
    let reversed = refused(&[2, 256], &bytes, 2..1, 256);
    assert!(matches!(reversed, QuantError::Rows { .. }));
    assert!(matches!(refused(&[2, 256], &bytes, 0..u64::MAX, 256), QuantError::Rows { .. }));
    assert_eq!(
        text(refused(&[2, 256], &bytes, 0..2, 511)),
        "512 numbers of \"layer.weight\" do not go into a target of 511"
    );
    assert_eq!(
        text(refused(&[2, 255], &bytes, 0..1, 255)),
        "\"layer.weight\" cannot have the shape [2, 255] as Q4_K: its elements are no whole number of blocks"
    );
    let huge = refused(&[u64::MAX, 256], &bytes, 0..1, 256);
    assert!(text(huge).contains("more than 2^64 elements"));
    // Counted, and more bytes than can be counted.
    assert!(matches!(refused(&[1 << 55, 256], &bytes, 0..1, 256), QuantError::PartSize { .. }));
}

#[test]
fn missing_parts_are_named() {
    let weight = ggml(GgmlType::Q4_K, &[1, 256]);
    let none = BTreeMap::<String, Vec<u8>>::new();
    let error = dequantize(&weight, &none, 0..1, Target::F32(&mut [0.0; 256])).unwrap_err().to_string();
    assert_eq!(error, "the packed data of \"layer.weight\" was not given: it is the tensor \"layer.weight\"");
    let bare = QuantWeight { parts: Vec::new(), ..weight };
    let error = dequantize(&bare, &none, 0..1, Target::F32(&mut [0.0; 256])).unwrap_err().to_string();
    assert_eq!(error, "the weight \"layer.weight\", Q4_K, has no packed data");
}

#[test]
fn plain_tensors_are_no_quantized_weights() {
    let kind = TensorType::Ggml(GgmlType::F16);
    let tensor = TensorInfo { name: "norm".into(), kind, shape: vec![2], file: 0, range: 0..4 };
    let error = QuantWeight::ggml(&tensor).unwrap_err().to_string();
    assert_eq!(error, "\"norm\" is stored as F16, which is not quantized");
}

#[test]
fn a_description_is_data() {
    let text = serde_json::to_string(&ggml(GgmlType::Q4_K, &[2, 256])).unwrap();
    assert_eq!(
        text,
        r#"{"name":"layer.weight","shape":[2,256],"format":{"Ggml":"Q4_K"},"parts":[{"role":"Data","tensor":"layer.weight","kind":"Q4_K","shape":[2,256]}],"transforms":[]}"#
    );
}

/// A weight of zeros in words, 32 by 64 in groups of 16, whose index names these groups.
fn indexed(words: Words, index: &[i32]) -> (QuantWeight, BTreeMap<String, Vec<u8>>) {
    use PartRole::{Data, GroupIndex, Scale, ZeroPoint};
    let (bits, group, zero_less_one) = (4, 16, false);
    let format = PackedInt { bits, words, group, indexed: true, zero_less_one, symmetric: false };
    let kinds = [(Data, "I32", 1024), (Scale, "F16", 256), (ZeroPoint, "I32", 64), (GroupIndex, "I32", 0)];
    let part = |(role, kind, _): (PartRole, &str, usize)| Part {
        role,
        tensor: format!("a.{role}"),
        kind: quant_router::kind_from_name(kind).unwrap(),
        shape: Vec::new(),
    };
    let parts = kinds.map(part).to_vec();
    let mut bytes: BTreeMap<String, Vec<u8>> =
        kinds.iter().map(|(role, _, size)| (format!("a.{role}"), vec![0x11; *size])).collect();
    let index = index.iter().flat_map(|group| group.to_le_bytes()).collect();
    bytes.insert("a.index of groups".into(), index);
    let (shape, format) = (vec![32, 64], Format::PackedInt(format));
    (QuantWeight { name: "a.weight".into(), shape, format, parts, transforms: Vec::new() }, bytes)
}

#[test]
fn an_index_of_groups_that_there_are_not_is_refused_by_name_before_a_number_is_written() {
    let good: Vec<i32> = (0..64).map(|column| column * 7 % 4).collect();
    for words in [Words::Columns, Words::Rows, Words::Along] {
        let mut out = vec![7.0; 64];
        let (weight, parts) = indexed(words, &good);
        check(&weight, &parts).unwrap();
        dequantize(&weight, &parts, 3..4, Target::F32(&mut out)).unwrap();
        assert!(out.iter().all(|number| number.is_finite()));
        for (column, group) in [(0, -1), (17, 4), (63, i32::MIN), (63, i32::MAX), (5, 1 << 16)] {
            let mut index = good.clone();
            index[column] = group;
            let (weight, parts) = indexed(words, &index);
            let mut out = vec![7.0; 64];
            let refused = dequantize(&weight, &parts, 3..4, Target::F32(&mut out)).unwrap_err();
            assert_eq!(
                refused.to_string(),
                format!(
                    "\"a.index of groups\" of \"a.weight\" puts column {column} in group {group}; there are 4 groups, counted from 0"
                )
            );
            assert_eq!(bits(&out), bits(&[7.0; 64]), "nothing was written");
            assert_eq!(check(&weight, &parts), Err(refused));
        }
    }
    // No index is asked for of who has none, and one too short is refused for its size first.
    let (weight, mut parts) = indexed(Words::Columns, &good);
    parts.insert("a.index of groups".into(), vec![0xff; 252]);
    assert!(matches!(check(&weight, &parts), Err(QuantError::PartSize { have: 252, need: 256, .. })));
}
