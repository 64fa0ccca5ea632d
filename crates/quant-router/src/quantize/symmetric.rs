//! Types of a byte: a row is divided by its scale, which makes its largest magnitude the type's largest number.

use super::QuantKind;
use super::encode::{e4m3, e5m2, int8};
use super::source::{Float, SCRATCH};

/// Some whole rows: their packed numbers and their scales, which fill `data` and `scale`.
pub(super) fn rows<F: Float>(
    kind: QuantKind,
    columns: usize,
    from: &[u8],
    data: &mut [u8],
    scale: &mut [u8],
) {
    let rows = from.chunks_exact(columns * F::BYTES).zip(data.chunks_exact_mut(columns));
    for ((from, data), scale) in rows.zip(scale.chunks_exact_mut(F::BYTES)) {
        match kind {
            QuantKind::QFloat8E4m3 => row::<F>(from, data, scale, 448.0, e4m3),
            QuantKind::QFloat8E5m2 => row::<F>(from, data, scale, 57344.0, e5m2),
            // The other types have no rows.
            _ => row::<F>(from, data, scale, 127.0, int8),
        }
    }
}

fn row<F: Float>(
    from: &[u8],
    data: &mut [u8],
    scale: &mut [u8],
    largest: f32,
    encode: impl Fn(f32) -> u8 + Copy,
) {
    let factor = F::round(F::largest(from) / largest);
    F::store(factor, scale);
    let mut scratch = [0.0; SCRATCH];
    for (from, data) in from.chunks(SCRATCH * F::BYTES).zip(data.chunks_mut(SCRATCH)) {
        let numbers = &mut scratch[..data.len()];
        F::load(from, numbers);
        for number in &mut *numbers {
            *number /= factor;
        }
        F::round_all(numbers);
        for (data, number) in data.iter_mut().zip(numbers) {
            *data = encode(*number);
        }
    }
}
