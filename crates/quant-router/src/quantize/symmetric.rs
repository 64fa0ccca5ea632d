//! Types of a byte: a row is divided by its scale, which makes its largest magnitude the type's largest number.

use super::QuantKind;
use super::encode::{e4m3, e5m2, int8, usual_int8};
use super::source::Float;

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
        let largest = match kind {
            QuantKind::QFloat8E4m3 => 448.0,
            QuantKind::QFloat8E5m2 => 57344.0,
            _ => 127.0,
        };
        let factor = F::round(F::largest(from) / largest);
        F::store(factor, scale);
        match kind {
            QuantKind::QFloat8E4m3 => F::divided(from, factor, data, e4m3),
            QuantKind::QFloat8E5m2 => F::divided(from, factor, data, e5m2),
            // A normal scale is rounded by 1/256 of it at most, so that no quotient is below -128.
            _ if F::is_usual(factor) => F::divided(from, factor, data, usual_int8),
            _ => F::divided(from, factor, data, int8),
        }
    }
}
