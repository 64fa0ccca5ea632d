//! Checks that the tensors of a header cover the file's data exactly: from its first byte, without gap or overlap, each
//! with as many bytes as its shape takes, to the last byte of the file.

use ::safetensors::Dtype;

use super::problem::HeaderProblem;
use crate::{TensorInfo, TensorType};

/// Puts the tensors in the order of their bytes, checks them against `data` bytes of data, and makes their ranges count
/// from the file's start, where the data begins at `data_start`. Gives the number of bytes after the last one.
pub(super) fn check(
    tensors: &mut [TensorInfo],
    data_start: u64,
    data: u64,
    allow_trailing: bool,
) -> Result<u64, HeaderProblem> {
    // By name first, where equal names meet; the names of no two tensors are equal after this.
    tensors.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(HeaderProblem::DuplicateTensor { tensor: pair[0].name.clone() });
    }
    let place = |tensor: &TensorInfo| (tensor.range.start, tensor.range.end);
    tensors.sort_unstable_by(|a, b| place(a).cmp(&place(b)).then_with(|| a.name.cmp(&b.name)));
    let mut end = 0;
    for (index, tensor) in tensors.iter().enumerate() {
        let before = index.checked_sub(1).map(|before| &tensors[before]);
        continues(before, end, tensor)?;
        sized(tensor)?;
        end = tensor.range.end;
    }
    if end > data {
        let over = tensors.iter().find(|tensor| tensor.range.end > data);
        let tensor = over.map_or_else(String::new, |tensor| tensor.name.clone());
        let (size, wanted) = (data_start + data, data_start.saturating_add(end));
        return Err(HeaderProblem::Truncated { tensor, size, wanted });
    }
    let trailing = data - end;
    if trailing > 0 && !allow_trailing {
        return Err(HeaderProblem::Trailing { bytes: trailing });
    }
    for tensor in tensors {
        tensor.range = data_start + tensor.range.start..data_start + tensor.range.end;
    }
    Ok(trailing)
}

/// Whether a tensor starts where the one before it ends.
fn continues(before: Option<&TensorInfo>, end: u64, tensor: &TensorInfo) -> Result<(), HeaderProblem> {
    let start = tensor.range.start;
    let name = || tensor.name.clone();
    if tensor.range.end < start {
        return Err(HeaderProblem::Reversed { tensor: name(), start, end: tensor.range.end });
    }
    match before {
        _ if start == end => Ok(()),
        None => Err(HeaderProblem::FirstOffset { tensor: name(), start }),
        Some(before) if start > end => {
            Err(HeaderProblem::Gap { tensor: name(), start, before: before.name.clone(), end })
        }
        Some(before) => {
            Err(HeaderProblem::Overlap { tensor: name(), start, before: before.name.clone(), end })
        }
    }
}

/// Whether a tensor has as many bytes as its type and shape take.
fn sized(tensor: &TensorInfo) -> Result<(), HeaderProblem> {
    let TensorType::Plain(dtype) = tensor.kind else { return Ok(()) };
    let (name, shape) = (|| tensor.name.clone(), || tensor.shape.clone());
    let Some(bits) = bits(dtype, &tensor.shape) else {
        return Err(HeaderProblem::Overflow { tensor: name(), dtype, shape: shape() });
    };
    if bits % 8 != 0 {
        return Err(HeaderProblem::PartialByte { tensor: name(), dtype, shape: shape(), bits });
    }
    let (wanted, found) = (bits / 8, tensor.bytes());
    if wanted != found {
        let (start, end) = (tensor.range.start, tensor.range.end);
        return Err(HeaderProblem::Size { tensor: name(), dtype, shape: shape(), wanted, found, start, end });
    }
    Ok(())
}

/// The bits of a tensor. Dimensions are multiplied from the left, as the official library does: `[2^63, 2, 0]` is refused.
fn bits(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    let elements = shape.iter().try_fold(1_u64, |product, dimension| product.checked_mul(*dimension))?;
    elements.checked_mul(dtype.bitsize() as u64)
}
