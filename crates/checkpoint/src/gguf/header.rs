//! A whole GGUF header: the fixed fields, then metadata, then the tensor table. It owns their order and the alignment.

use std::collections::BTreeMap;

use super::cursor::{Cursor, Place};
use super::shape::{self, Restored};
use super::value::{Array, Value};
use super::{ByteSource, GgufProblem, MAGIC, Split, entries, split, tensors};
use crate::foreign::{Foreign, LOOK};
use crate::{CheckpointError, FileHeader, Limits, Result, TensorInfo, TensorType};

/// The entry that says what tensors' offsets are multiples of.
const ALIGNMENT: &str = "general.alignment";
/// The alignment of files that do not say.
const DEFAULT_ALIGNMENT: u64 = 32;

/// How formats before GGUF begin.
const OLDER: [&[u8]; 4] = [b"lmgg", b"fmgg", b"tjgg", b"algg"];

/// What a GGUF file says beyond its tensors, with the types that it says it in.
#[derive(Debug, Clone, PartialEq)]
pub struct GgufHeader {
    /// The format's version: 2 or 3.
    pub version: u32,
    /// What tensors' offsets are multiples of, in bytes.
    pub alignment: u64,
    values: BTreeMap<String, Value>,
    stored: BTreeMap<String, Vec<u64>>,
    notes: Vec<String>,
    split: Option<Split>,
}

impl GgufHeader {
    /// Everything in the metadata, by key.
    pub fn values(&self) -> &BTreeMap<String, Value> {
        &self.values
    }

    /// One value of the metadata.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// The shape in which a tensor is stored, where its true one is another (see [`read_header`]); slowest first. The
    /// tensor's blocks follow the rows of this shape.
    pub fn stored_shape(&self, tensor: &str) -> Option<&[u64]> {
        self.stored.get(tensor).map(Vec::as_slice)
    }

    /// What the user should know of this file.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Which part of a split model this is, if it says so.
    pub fn split(&self) -> Option<Split> {
        self.split
    }

    /// All elements of a list in the metadata, read again from the file if they were too many to keep. Refused beyond
    /// `limits.max_metadata` bytes.
    ///
    /// `None` if there is no list under this key.
    pub fn elements(
        &self,
        source: &dyn ByteSource,
        key: &str,
        limits: &Limits,
    ) -> Result<Option<Vec<Value>>> {
        let Some(array) = self.get(key).and_then(Value::as_array) else { return Ok(None) };
        if let Some(kept) = array.values() {
            return Ok(Some(kept.to_vec()));
        }
        entries::elements(source, key, array, limits.max_metadata as u64).map(Some)
    }
}

/// Reads a header. `file` is the file's number among those of its model.
///
/// Tensors come in the order of their bytes, with shapes slowest dimension first; a quantized tensor's shape counts
/// elements, not bytes. Where `comfy.gguf.orig_shape.<name>` gives a true shape with as many elements, the tensor has that
/// one, and [`GgufHeader::stored_shape`] the other. Types that are plain numbers are named as safetensors names them.
///
/// The metadata in the [`FileHeader`] is text; lists too long to keep are left out of it.
///
/// # Errors
///
/// [`CheckpointError::Gguf`] says what is wrong with the file, [`CheckpointError::Foreign`] what it is instead. Bytes after
/// the last tensor and its padding are refused unless `allow_trailing`.
pub fn read_header(
    source: &dyn ByteSource,
    file: usize,
    limits: &Limits,
    allow_trailing: bool,
) -> Result<(FileHeader, GgufHeader)> {
    check_magic(source)?;
    let mut cursor = Cursor::new(source, MAGIC.len() as u64, limits.max_header);
    let version = version(&mut cursor)?;
    let tensor_count = cursor.u64(Place::Start)?;
    let entry_count = cursor.u64(Place::Start)?;
    let values = entries::read(&mut cursor, entry_count, limits)?;
    let metadata = as_text(&values);
    let room = limits.max_memory.saturating_sub(memory(&values));
    let mut table = tensors::read(&mut cursor, tensor_count, room, limits)?;

    let alignment = alignment(&cursor, &values)?;
    // The position is inside the file and the alignment has 32 bits: no overflow.
    let data_start = cursor.position().next_multiple_of(alignment);
    let trailing = tensors::place(&cursor, &mut table, alignment, data_start, source.size())?;
    if trailing > 0 && !allow_trailing {
        return cursor.fail(GgufProblem::Trailing { bytes: trailing });
    }
    let Restored { stored, notes } = shape::restore(&cursor, &values, &mut table, limits)?;
    let split = split::of(&cursor, &values)?;
    let tensors = table.into_iter().map(|entry| TensorInfo {
        range: entry.range(data_start),
        kind: entry.kind.plain().map_or(TensorType::Ggml(entry.kind), TensorType::Plain),
        name: entry.name,
        shape: entry.shape,
        file,
    });
    let header = FileHeader { tensors: tensors.collect(), metadata, data_start, trailing };
    Ok((header, GgufHeader { version, alignment, values, stored, notes, split }))
}

/// Refuses what is not GGUF, saying what it is instead.
fn check_magic(source: &dyn ByteSource) -> Result<()> {
    let mut start = vec![0; source.size().min(LOOK) as usize];
    source.read_exact_at(0, &mut start)?;
    if start.starts_with(&MAGIC) {
        return Ok(());
    }
    let found = start[..start.len().min(MAGIC.len())].escape_ascii().to_string();
    let problem = match Foreign::of(&start) {
        Some(kind) => return Err(CheckpointError::Foreign { path: source.path().into(), kind }),
        None if start.is_empty() => GgufProblem::Empty,
        None if OLDER.iter().any(|older| start.starts_with(older)) => GgufProblem::Older { found },
        None => GgufProblem::NotGguf { found },
    };
    Err(CheckpointError::gguf(source.path(), problem))
}

fn version(cursor: &mut Cursor<'_>) -> Result<u32> {
    let version = cursor.u32(Place::Start)?;
    match version {
        2 | 3 => Ok(version),
        // A small number written the other way round.
        swapped if (1..=0xFFFF).contains(&swapped.swap_bytes()) => {
            cursor.fail(GgufProblem::BigEndian { version: swapped.swap_bytes() })
        }
        version => cursor.fail(GgufProblem::Version { version }),
    }
}

fn alignment(cursor: &Cursor<'_>, values: &BTreeMap<String, Value>) -> Result<u64> {
    match values.get(ALIGNMENT) {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(&Value::U32(alignment)) if alignment.is_power_of_two() => Ok(alignment.into()),
        Some(other) => cursor.fail(GgufProblem::BadValue {
            key: ALIGNMENT.into(),
            found: other.describe(),
            wanted: "a power of two (U32)",
        }),
    }
}

/// Metadata as text, without the lists that were not kept.
fn as_text(values: &BTreeMap<String, Value>) -> BTreeMap<String, String> {
    let kept = values.iter().filter(|(_, value)| value.as_array().is_none_or(|list| list.values().is_some()));
    kept.map(|(key, value)| (key.clone(), value.to_string())).collect()
}

/// Bytes of RAM that the metadata takes, as values and as text, about.
fn memory(values: &BTreeMap<String, Value>) -> usize {
    let entry = size_of::<Value>() + size_of::<Array>() + 3 * size_of::<String>();
    values.iter().map(|(key, value)| entry + 2 * (key.len() + value.heap())).sum()
}
