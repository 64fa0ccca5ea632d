//! The tensor table of a GGUF file: read, then checked against the file's alignment and size. It owns the arithmetic.

use std::ops::Range;

use super::GgufProblem;
use super::cursor::{Cursor, Place};
use super::types::GgmlType;
use crate::{Limits, Result, TensorInfo};

/// Bytes of the smallest entry: an empty name, no dimensions, a type and an offset.
const LEAST: u64 = 8 + 4 + 4 + 8;
/// No file is larger than this: what `off_t` holds.
const MAX_FILE: u64 = i64::MAX as u64;

/// A tensor as the table says it.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) kind: GgmlType,
    /// Slowest first: the reverse of what is stored.
    pub(super) shape: Vec<u64>,
    /// From the start of the data.
    offset: u64,
    bytes: u64,
}

impl Entry {
    /// Its bytes in the file.
    pub(super) fn range(&self, data_start: u64) -> Range<u64> {
        // Checked in `place`: nothing lies past the file's end.
        data_start + self.offset..data_start + self.offset + self.bytes
    }

    /// Bytes of RAM that it takes, about; `max_memory` is counted in them.
    fn memory(&self) -> usize {
        Self::FIXED + self.name.len() + 2 * size_of_val(&*self.shape)
    }

    /// The same for any entry: it is in this table, in a list of names while they are compared, and in the header that is
    /// given back.
    const FIXED: usize = size_of::<Self>() + size_of::<&str>() + size_of::<TensorInfo>();
}

/// Reads so many entries, keeping at most `room` bytes of RAM.
pub(super) fn read(cursor: &mut Cursor<'_>, count: u64, room: usize, limits: &Limits) -> Result<Vec<Entry>> {
    cursor.check_count(|| "tensors".into(), count, LEAST)?;
    let limit = limits.max_tensors as u64;
    if count > limit {
        let place = "its tensor table".to_owned();
        return cursor.fail(GgufProblem::Limit { place, what: "entries", value: count, limit });
    }
    // Never more than will be accepted, so that the table does not grow by copying.
    let mut entries = Vec::with_capacity((count as usize).min(room / Entry::FIXED));
    let mut kept = 0;
    for index in 0..count {
        let entry = read_entry(cursor, index, limits)?;
        kept += entry.memory();
        if kept > room {
            let (place, value, limit) = ("its tensor table".to_owned(), kept as u64, room as u64);
            return cursor.fail(GgufProblem::Limit { place, what: "bytes in RAM", value, limit });
        }
        entries.push(entry);
    }
    Ok(entries)
}

fn read_entry(cursor: &mut Cursor<'_>, index: u64, limits: &Limits) -> Result<Entry> {
    let name = cursor.text(limits.max_name as u64, Place::Tensor(index))?;
    let place = Place::Named(&name);
    let rank = cursor.u32(place)?;
    if rank as usize > limits.max_rank {
        let (place, value, limit) = (format!("tensor {name:?}"), rank.into(), limits.max_rank as u64);
        return cursor.fail(GgufProblem::Limit { place, what: "dimensions", value, limit });
    }
    let dims = (0..rank).map(|_| cursor.u64(place)).collect::<Result<Vec<_>>>()?;
    let number = cursor.u32(place)?;
    let offset = cursor.u64(place)?;
    let Some(kind) = GgmlType::from_number(number) else {
        let once = GgmlType::removed(number).map_or(String::new(), |once| format!(" (once {once})"));
        return cursor.fail(GgufProblem::TensorType { tensor: name, number, once });
    };
    match bytes(&dims, kind) {
        Ok(bytes) => {
            let shape = dims.into_iter().rev().collect();
            Ok(Entry { name, kind, shape, offset, bytes })
        }
        Err(Unsized::Rows) => {
            let (columns, block) = (dims.first().copied().unwrap_or(1), kind.block_elements());
            cursor.fail(GgufProblem::Rows { tensor: name, columns, kind: kind.name(), block })
        }
        Err(Unsized::Overflow) => {
            cursor.fail(GgufProblem::Overflow { tensor: name, kind: kind.name(), dims })
        }
    }
}

/// Why dimensions have no size in bytes.
#[derive(Debug, PartialEq)]
enum Unsized {
    Rows,
    Overflow,
}

/// Bytes of a tensor, dimensions fastest first. Every dimension and every product stays below 2^63, whether or not
/// another dimension is 0.
fn bytes(dims: &[u64], kind: GgmlType) -> Result<u64, Unsized> {
    let columns = dims.first().copied().unwrap_or(1);
    if !columns.is_multiple_of(kind.block_elements()) {
        return Err(Unsized::Rows);
    }
    let fits = |product: Option<u64>| product.filter(|&n| n <= MAX_FILE).ok_or(Unsized::Overflow);
    let mut elements = 1_u64;
    let mut bytes = fits(kind.row_bytes(columns))?.max(1);
    for (index, &dim) in dims.iter().enumerate() {
        elements = fits(elements.checked_mul(dim.max(1)))?;
        if index > 0 {
            bytes = fits(bytes.checked_mul(dim.max(1)))?;
        }
    }
    Ok(if dims.contains(&0) { 0 } else { bytes })
}

/// Sorts tensors by where they lie and checks that each has its own place inside the file. `data_start` and `size` are
/// of the file; gives back how many bytes follow the last tensor and its padding.
pub(super) fn place(
    cursor: &Cursor<'_>,
    entries: &mut [Entry],
    alignment: u64,
    data_start: u64,
    size: u64,
) -> Result<u64> {
    check_names(cursor, entries)?;
    if let Some(entry) = entries.iter().find(|entry| !entry.offset.is_multiple_of(alignment)) {
        let (tensor, offset) = (entry.name.clone(), entry.offset);
        return cursor.fail(GgufProblem::Misaligned { tensor, offset, alignment });
    }
    entries.sort_unstable_by(|a, b| (a.offset, a.bytes, &a.name).cmp(&(b.offset, b.bytes, &b.name)));
    let mut last: Option<&Entry> = None;
    for entry in entries.iter() {
        let start = data_start.saturating_add(entry.offset);
        let end = start.saturating_add(entry.bytes);
        if end > size {
            let tensor = entry.name.clone();
            return cursor.fail(GgufProblem::TruncatedData { tensor, start, end, size });
        }
        if entry.bytes == 0 {
            continue;
        }
        if let Some(before) = last {
            let end = before.range(data_start).end;
            if start < end {
                let (before, tensor) = (before.name.clone(), entry.name.clone());
                return cursor.fail(GgufProblem::Overlap { before, tensor, end, start });
            }
        }
        last = Some(entry);
    }
    // Padded as writers pad it; the sum is inside the file, so that rounding up cannot overflow.
    let end = last.map_or(0, |entry| (entry.offset + entry.bytes).next_multiple_of(alignment));
    Ok(size.saturating_sub(data_start.saturating_add(end)))
}

fn check_names(cursor: &Cursor<'_>, entries: &[Entry]) -> Result<()> {
    let mut names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => cursor.fail(GgufProblem::DuplicateTensor { tensor: pair[0].to_owned() }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_blocks_times_rows() {
        assert_eq!(bytes(&[64, 3], GgmlType::Q8_0), Ok(2 * 34 * 3));
        assert_eq!(bytes(&[], GgmlType::F32), Ok(4));
        assert_eq!(bytes(&[0, 5], GgmlType::F32), Ok(0));
        assert_eq!(bytes(&[256, 2, 3, 4, 5], GgmlType::IQ1_M), Ok(56 * 120));
    }

    #[test]
    fn rows_that_are_no_blocks_have_no_size() {
        assert_eq!(bytes(&[33], GgmlType::Q8_0), Err(Unsized::Rows));
        assert_eq!(bytes(&[], GgmlType::Q4_K), Err(Unsized::Rows));
    }

    #[test]
    fn no_dimension_hides_behind_a_zero() {
        assert_eq!(bytes(&[0, u64::MAX], GgmlType::F32), Err(Unsized::Overflow));
        assert_eq!(bytes(&[1 << 32, 1 << 32], GgmlType::I8), Err(Unsized::Overflow));
        assert_eq!(bytes(&[1 << 61], GgmlType::F64), Err(Unsized::Overflow));
        assert_eq!(bytes(&[1 << 62], GgmlType::I8), Ok(1 << 62));
    }
}
