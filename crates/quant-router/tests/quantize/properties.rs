//! Any weight: pieces of it are what all of it is, the numbers come back within half a step, and what does not fit is refused
//! before anything is written.

use half::{bf16, f16};
use proptest::prelude::*;
use proptest::sample::select;
use quant_router::formats::Number;
use quant_router::{PartRole, QuantError, QuantKind, Quantizer, Target, dequantize};

use super::{Parts, UNWRITTEN, quantize};

fn numbers() -> impl Strategy<Value = Number> {
    select(vec![Number::F32, Number::Bf16, Number::F16])
}

/// A number in the bytes of its type.
fn bytes(number: Number, value: f32) -> Vec<u8> {
    match number {
        Number::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
        Number::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

prop_compose! {
    fn weights()(number in numbers(), kind in select(QuantKind::ALL.to_vec()), rows in 2..9_u64, columns in 1..300_u64)
        (values in prop::collection::vec(-8.0..8.0_f32, (rows * columns) as usize),
         number in Just(number), kind in Just(kind), rows in Just(rows), columns in Just(columns))
        -> (Number, QuantKind, [u64; 2], Vec<u8>) {
        (number, kind, [rows, columns], values.into_iter().flat_map(|value| bytes(number, value)).collect())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn pieces_are_what_the_whole_is((number, kind, shape, source) in weights(), cut in 0..9_u64) {
        let (quantizer, whole) = quantize(&shape, number, kind, &source);
        let mut parts = Parts::of(&quantizer);
        let cut = cut.min(shape[0]);
        let at = (cut * shape[1]) as usize * number.bytes();
        // The later rows first, so that neither relies on the other.
        quantizer.quantize(&source[at..], cut..shape[0], &mut parts.buffers()).unwrap();
        quantizer.quantize(&source[..at], 0..cut, &mut parts.buffers()).unwrap();
        prop_assert_eq!(&parts.scale, &whole.scale);
        prop_assert_eq!(&parts.shift, &whole.shift);
        prop_assert_eq!(&parts.data, &whole.data);
    }

    #[test]
    fn numbers_come_back((number, kind, shape, source) in weights()) {
        let (quantizer, parts) = quantize(&shape, number, kind, &source);
        let scale = parts.scale.clone();
        let parts = parts.named(&quantizer);
        let mut back = vec![0.0; (shape[0] * shape[1]) as usize];
        dequantize(quantizer.weight(), &parts, 0..shape[0], Target::F32(&mut back)).unwrap();
        let group = back.len() / (scale.len() / number.bytes());
        for (index, &back) in back.iter().enumerate() {
            let (exact, scale) = (number.at(&source, index), number.at(&scale, index / group));
            // Half a step, and what rounding to the weight's type adds to each number on the way, of at most 16.
            let rounding = 16.0 * match number { Number::F32 => 1e-6, Number::F16 => 3e-3, _ => 3e-2 };
            let step = match kind {
                QuantKind::QFloat8E4m3 => exact.abs() / 16.0 + scale,
                QuantKind::QFloat8E5m2 => exact.abs() / 8.0 + scale,
                _ => scale / 2.0,
            };
            prop_assert!((exact - back).abs() <= step + rounding, "{} {}: {} {}", kind, index, exact, back);
        }
    }

    /// Any bits: nothing panics, every byte is written, and a second run gives the same.
    #[test]
    fn any_bits(number in numbers(), kind in select(QuantKind::ALL.to_vec()), rows in 2..5_u64,
                bytes in prop::collection::vec(any::<u8>(), 16..2000)) {
        let columns = bytes.len() as u64 / number.bytes() as u64 / rows;
        prop_assume!(columns > 0);
        let source = &bytes[..(rows * columns) as usize * number.bytes()];
        let (quantizer, one) = quantize(&[rows, columns], number, kind, source);
        let mut two = Parts { data: vec![!UNWRITTEN; one.data.len()], ..Parts::of(&quantizer) };
        quantizer.quantize(source, 0..rows, &mut two.buffers()).unwrap();
        prop_assert_eq!((&one.data, &one.scale, &one.shift), (&two.data, &two.scale, &two.shift));
        let parts = one.named(&quantizer);
        let mut back = vec![0.0; (rows * columns) as usize];
        dequantize(quantizer.weight(), &parts, 0..rows, Target::F32(&mut back)).unwrap();
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_written() {
    let quantizer = Quantizer::new("up.weight", &[4, 6], Number::Bf16, QuantKind::QInt8).unwrap();
    let mut parts = Parts::of(&quantizer);
    let mut refused = |source: usize, rows: std::ops::Range<u64>, data: usize| {
        let mut buffers = parts.buffers();
        buffers.data = &mut buffers.data[..data];
        let error = quantizer.quantize(&vec![0; source], rows, &mut buffers).unwrap_err();
        assert!(parts.data.iter().chain(&parts.scale).all(|&byte| byte == UNWRITTEN));
        error
    };
    let layer = || "up.weight".to_owned();
    assert_eq!(refused(48, 0..4, 23), {
        let (role, tensor) = (PartRole::Data, "up.weight._data".into());
        QuantError::PartSize { layer: layer(), role, tensor, have: 23, need: 24 }
    });
    assert_eq!(refused(47, 0..4, 24), QuantError::SourceSize { layer: layer(), have: 47, need: 48 });
    assert_eq!(refused(48, 3..5, 24), QuantError::Rows { layer: layer(), start: 3, end: 5, rows: 4 });
    let text = refused(47, 0..4, 24).to_string();
    assert_eq!(text, "the rows of \"up.weight\" that shall be quantized have 48 bytes, and 47 were given");
}

#[test]
fn weights_that_quanto_does_not_have_are_refused() {
    let new = |shape: &[u64], number, kind| Quantizer::new("w", shape, number, kind);
    let cases: [(&[u64], Number, QuantKind, &str); 6] = [
        (&[], Number::F32, QuantKind::QInt8, "one number"),
        (&[5], Number::F32, QuantKind::QInt8, "no rows"),
        (&[0, 5], Number::F32, QuantKind::QInt8, "empty"),
        (&[1, 70], Number::F32, QuantKind::QInt4, "single group"),
        (&[4, 4], Number::E4m3, QuantKind::QInt8, "compute in"),
        (&[1 << 40, 1 << 30], Number::F32, QuantKind::QInt2, "2^64"),
    ];
    for (shape, number, kind, why) in cases {
        let error = new(shape, number, kind).unwrap_err().to_string();
        assert!(error.contains("\"w\"") && error.contains(why), "{error}");
    }
    assert_eq!(QuantKind::of("qfloat8"), Some(QuantKind::QFloat8E4m3));
    assert!(QuantKind::ALL.iter().all(|kind| QuantKind::of(kind.name()) == Some(*kind)));
    assert_eq!(QuantKind::of("int8"), None);
}
