//! What shape a stored tensor really has. Converters reshape tensors that they cannot quantize, and leave out leading
//! dimensions of 1; both are undone only where the number of elements agrees.

use std::collections::BTreeMap;

use super::GgufProblem;
use super::cursor::Cursor;
use super::tensors::Entry;
use super::value::Value;
use crate::{Limits, Result};

/// The entries that hold a tensor's true shape, slowest dimension first, begin so.
const ORIGINAL: &str = "comfy.gguf.orig_shape.";

/// What became of the tensors' shapes.
#[derive(Debug, Default)]
pub(super) struct Restored {
    /// The stored shapes of tensors whose true shape is another.
    pub(super) stored: BTreeMap<String, Vec<u64>>,
    /// What the user should know.
    pub(super) notes: Vec<String>,
}

/// Gives tensors the shapes that the metadata says are theirs.
pub(super) fn restore(
    cursor: &Cursor<'_>,
    values: &BTreeMap<String, Value>,
    entries: &mut [Entry],
    limits: &Limits,
) -> Result<Restored> {
    let mut restored = Restored::default();
    let mut wanted = BTreeMap::new();
    for (key, value) in values.range(ORIGINAL.to_owned()..) {
        let Some(name) = key.strip_prefix(ORIGINAL) else { break };
        wanted.insert(name, original(cursor, key, value, limits)?);
    }
    for entry in entries {
        let Some(shape) = wanted.remove(entry.name.as_str()) else { continue };
        // The product of the stored dimensions was checked when the table was read.
        let elements: u64 = entry.shape.iter().product();
        if product(&shape) != Some(elements) {
            return cursor.fail(GgufProblem::OriginalShape {
                tensor: entry.name.clone(),
                wanted: shape,
                stored: entry.shape.clone(),
                elements,
            });
        }
        if shape != entry.shape {
            restored.stored.insert(entry.name.clone(), std::mem::replace(&mut entry.shape, shape));
        }
    }
    for name in wanted.into_keys() {
        restored
            .notes
            .push(format!("{:?} is the shape of no tensor in this file", format!("{ORIGINAL}{name}")));
    }
    Ok(restored)
}

/// The dimensions in an entry.
fn original(cursor: &Cursor<'_>, key: &str, value: &Value, limits: &Limits) -> Result<Vec<u64>> {
    let kept = value.as_array().and_then(|array| array.values()).filter(|kept| kept.len() <= limits.max_rank);
    let dims = kept.and_then(|kept| kept.iter().map(Value::as_u64).collect());
    match dims {
        Some(dims) => Ok(dims),
        None => cursor.fail(GgufProblem::BadValue {
            key: key.to_owned(),
            found: value.to_string(),
            wanted: "a list of integers from 0 on",
        }),
    }
}

fn product(shape: &[u64]) -> Option<u64> {
    shape.iter().try_fold(1_u64, |product, &dim| product.checked_mul(dim))
}

/// How a stored shape serves where another is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShapeFit {
    /// They are the same.
    Same,
    /// The wanted one has so many leading dimensions of 1 more. Worth a note to the user.
    LeadingOnes(usize),
    /// They are not the same tensor's.
    No,
}

/// Compares a stored shape with the one that a model's parameter has, slowest dimension first.
///
/// ```
/// use checkpoint::gguf::{ShapeFit, fit_shape};
///
/// assert_eq!(fit_shape(&[3840], &[1, 3840]), ShapeFit::LeadingOnes(1));
/// assert_eq!(fit_shape(&[3840], &[3840, 1]), ShapeFit::No);
/// ```
pub fn fit_shape(stored: &[u64], wanted: &[u64]) -> ShapeFit {
    if stored == wanted {
        return ShapeFit::Same;
    }
    match wanted.strip_suffix(stored) {
        Some(ones) if ones.iter().all(|&dim| dim == 1) => ShapeFit::LeadingOnes(ones.len()),
        _ => ShapeFit::No,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_leading_ones_are_added() {
        assert_eq!(fit_shape(&[2, 3], &[2, 3]), ShapeFit::Same);
        assert_eq!(fit_shape(&[2, 3], &[1, 1, 2, 3]), ShapeFit::LeadingOnes(2));
        assert_eq!(fit_shape(&[], &[1]), ShapeFit::LeadingOnes(1));
        assert_eq!(fit_shape(&[2, 3], &[3, 2]), ShapeFit::No);
        assert_eq!(fit_shape(&[6], &[2, 3]), ShapeFit::No);
        assert_eq!(fit_shape(&[2, 3], &[2, 2, 3]), ShapeFit::No);
        assert_eq!(fit_shape(&[1, 3], &[3]), ShapeFit::No);
    }
}
