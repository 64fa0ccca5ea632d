//! What several test files need: descriptions made by hand, and hashes of numbers.
#![allow(dead_code, clippy::unwrap_used, reason = "tests; not every file uses all of it")]

use checkpoint::gguf::GgmlType;
use checkpoint::{TensorInfo, TensorType};
use quant_router::QuantWeight;

/// A weight of ggml blocks, which a file would hold under this name.
pub(crate) fn ggml(kind: GgmlType, shape: &[u64]) -> QuantWeight {
    let kind = TensorType::Ggml(kind);
    let tensor =
        TensorInfo { name: "layer.weight".into(), kind, shape: shape.to_vec(), file: 0, range: 0..0 };
    QuantWeight::ggml(&tensor).unwrap()
}

/// The CRC-32 of numbers as little-endian bytes, every NaN being the same.
pub(crate) fn crc32(numbers: &[f32]) -> u32 {
    let table: [u32; 256] = std::array::from_fn(|byte| {
        (0..8).fold(byte as u32, |crc, _| if crc & 1 == 1 { 0xedb8_8320 ^ crc >> 1 } else { crc >> 1 })
    });
    let bits = |number: &f32| if number.is_nan() { 0x7fc0_0000 } else { number.to_bits() };
    let bytes = numbers.iter().flat_map(|number| bits(number).to_le_bytes());
    !bytes.fold(u32::MAX, |crc, byte| table[(crc as u8 ^ byte) as usize] ^ crc >> 8)
}
