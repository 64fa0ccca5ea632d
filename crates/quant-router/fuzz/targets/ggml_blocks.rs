//! Any bytes as a weight of any ggml type and shape: what is accepted has exactly the bytes of its shape, every block gives the
//! same numbers alone as among others, and bf16 and f16 are the f32 numbers rounded.
//!
//! The first byte is the type, the next two are rows and columns, the fourth is the first row to decode; the rest is blocks.

use checkpoint::gguf::GgmlType;
use checkpoint::{TensorInfo, TensorType};
use half::{bf16, f16};
use quant_router::{QuantWeight, Target, dequantize};

const NAME: &str = "layer.weight";
/// What is where nothing was written.
const UNWRITTEN: u32 = 0x7fc1_2345;

/// Panics if anything is wrong.
pub(crate) fn run(data: &[u8]) {
    let Some((&[kind, rows, columns, first], blocks)) = data.split_first_chunk() else { return };
    let kinds: Vec<_> = GgmlType::all().collect();
    let kind = kinds[usize::from(kind) % kinds.len()];
    // Rows of any length first, which mostly fit nothing; then as many whole blocks as there are bytes for.
    decode(kind, [u64::from(rows), u64::from(columns)], first, blocks);
    let count = blocks.len() as u64 / kind.block_bytes();
    let whole = &blocks[..(count * kind.block_bytes()) as usize];
    let elements = count * kind.block_elements();
    let columns = [kind.block_elements(), elements, 1, 4][usize::from(rows) % 4].max(1);
    if elements.is_multiple_of(columns) {
        decode(kind, [elements / columns, columns], first, whole);
    }
}

fn decode(kind: GgmlType, shape: [u64; 2], first: u8, bytes: &[u8]) {
    let tensor = TensorInfo {
        name: NAME.into(),
        kind: TensorType::Ggml(kind),
        shape: shape.to_vec(),
        file: 0,
        range: 0..0,
    };
    let Ok(weight) = QuantWeight::ggml(&tensor) else {
        assert!(!kind.is_quantized());
        return;
    };
    let [rows, columns] = shape;
    let parts = (NAME, bytes);
    let mut all = vec![f32::from_bits(UNWRITTEN); (rows * columns) as usize];
    let outcome = dequantize(&weight, &parts, 0..rows, Target::F32(&mut all));
    let fits = kind.row_bytes(rows * columns) == Some(bytes.len() as u64);
    assert_eq!(outcome.is_ok(), fits, "{kind} {shape:?}: {outcome:?}");
    if outcome.is_err() {
        assert!(all.iter().all(|number| number.to_bits() == UNWRITTEN), "written in spite of the error");
        return;
    }
    // Two fillings, so that a number left out is seen whatever the others are.
    let mut again = vec![0.0; all.len()];
    assert_eq!(dequantize(&weight, &parts, 0..rows, Target::F32(&mut again)), Ok(()));
    assert!(same(&again, &all), "{kind} {shape:?} leaves numbers out");

    let some = u64::from(first).min(rows)..rows;
    let expected = &all[(some.start * columns) as usize..];
    let mut part = vec![0.0; expected.len()];
    assert_eq!(dequantize(&weight, &parts, some.clone(), Target::F32(&mut part)), Ok(()));
    assert!(same(&part, expected), "{kind} {some:?}");
    let (mut brain, mut half) = (vec![bf16::ZERO; expected.len()], vec![f16::ZERO; expected.len()]);
    assert_eq!(dequantize(&weight, &parts, some.clone(), Target::Bf16(&mut brain)), Ok(()));
    assert_eq!(dequantize(&weight, &parts, some, Target::F16(&mut half)), Ok(()));
    for ((exact, brain), half) in expected.iter().zip(brain).zip(half) {
        assert!(
            exact.is_nan() && brain.is_nan() || brain == bf16::from_f32(*exact),
            "{kind}: {exact} {brain}"
        );
        assert!(exact.is_nan() && half.is_nan() || half == f16::from_f32(*exact), "{kind}: {exact} {half}");
    }
}

fn same(one: &[f32], other: &[f32]) -> bool {
    one.iter()
        .zip(other)
        .all(|(one, other)| one.to_bits() == other.to_bits() || one.is_nan() && other.is_nan())
}
