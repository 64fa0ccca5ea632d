//! The metadata entries of a GGUF file: keys, and values of every type, nested lists too. It owns what of them is kept.

use std::collections::BTreeMap;

use super::cursor::{Cursor, Place};
use super::value::{Array, Value, ValueType};
use super::{ByteSource, GgufProblem};
use crate::{Limits, Result};

/// Bytes of the smallest entry: an empty key, a type and one byte.
const LEAST: u64 = 8 + 4 + 1;
/// Lists in lists in lists: more than any writer uses, and few enough for recursion.
const MAX_DEPTH: u32 = 4;
/// Lists of at most so many elements, and so many bytes, are kept.
const KEPT_ELEMENTS: u64 = 64;
const KEPT_BYTES: u64 = 4 << 10;

/// Reads so many entries.
pub(super) fn read(cursor: &mut Cursor<'_>, count: u64, limits: &Limits) -> Result<BTreeMap<String, Value>> {
    cursor.check_count(|| "metadata entries".into(), count, LEAST)?;
    let limit = limits.max_metadata_entries as u64;
    if count > limit {
        let (place, what) = ("its metadata".to_owned(), "entries");
        return cursor.fail(GgufProblem::Limit { place, what, value: count, limit });
    }
    let mut entries = BTreeMap::new();
    let mut room = limits.max_metadata as u64;
    for index in 0..count {
        let key = cursor.text(limits.max_name as u64, Place::Key(index))?;
        let number = cursor.u32(Place::Value(&key))?;
        let kind = value_type(cursor, &key, number)?;
        let value = read_value(cursor, &key, kind, room)?;
        let kept = (key.len() + value.heap()) as u64;
        let Some(left) = room.checked_sub(kept) else {
            let limit = limits.max_metadata as u64;
            let (place, what, value) = ("its metadata".to_owned(), "bytes", limit - room + kept);
            return cursor.fail(GgufProblem::Limit { place, what, value, limit });
        };
        room = left;
        if entries.contains_key(&key) {
            return cursor.fail(GgufProblem::DuplicateKey { key });
        }
        entries.insert(key, value);
    }
    Ok(entries)
}

/// Reads all elements of a list that was not kept, of which `max_bytes` may lie in the file and in RAM.
pub(super) fn elements(
    source: &dyn ByteSource,
    key: &str,
    array: &Array,
    max_bytes: u64,
) -> Result<Vec<Value>> {
    let mut cursor = Cursor::new(source, array.range.start, array.range.end);
    let bytes = array.range.end - array.range.start;
    let taken = bytes.max(array.count.saturating_mul(size_of::<Value>() as u64));
    if taken > max_bytes {
        let place = Place::Value(key).words();
        return cursor.fail(GgufProblem::Limit { place, what: "bytes", value: taken, limit: max_bytes });
    }
    (0..array.count).map(|_| read_value(&mut cursor, key, array.element, max_bytes)).collect()
}

fn value_type(cursor: &Cursor<'_>, key: &str, number: u32) -> Result<ValueType> {
    match ValueType::from_number(number) {
        Some(kind) => Ok(kind),
        None => cursor.fail(GgufProblem::ValueType { key: key.to_owned(), number }),
    }
}

/// Reads one value, text of at most `room` bytes.
fn read_value(cursor: &mut Cursor<'_>, key: &str, kind: ValueType, room: u64) -> Result<Value> {
    let place = Place::Value(key);
    Ok(match kind {
        ValueType::U8 => Value::U8(u8::from_le_bytes(cursor.take(place)?)),
        ValueType::I8 => Value::I8(i8::from_le_bytes(cursor.take(place)?)),
        ValueType::U16 => Value::U16(u16::from_le_bytes(cursor.take(place)?)),
        ValueType::I16 => Value::I16(i16::from_le_bytes(cursor.take(place)?)),
        ValueType::U32 => Value::U32(u32::from_le_bytes(cursor.take(place)?)),
        ValueType::I32 => Value::I32(i32::from_le_bytes(cursor.take(place)?)),
        ValueType::F32 => Value::F32(f32::from_le_bytes(cursor.take(place)?)),
        ValueType::U64 => Value::U64(u64::from_le_bytes(cursor.take(place)?)),
        ValueType::I64 => Value::I64(i64::from_le_bytes(cursor.take(place)?)),
        ValueType::F64 => Value::F64(f64::from_le_bytes(cursor.take(place)?)),
        ValueType::Bool => match cursor.take(place)? {
            [0] => Value::Bool(false),
            [1] => Value::Bool(true),
            [value] => return cursor.fail(GgufProblem::Boolean { key: key.to_owned(), value }),
        },
        ValueType::Text => match String::from_utf8(cursor.bytes(room, place)?) {
            Ok(text) => Value::Text(text),
            Err(error) => Value::Bytes(error.into_bytes()),
        },
        ValueType::Array => Value::Array(read_array(cursor, key)?),
    })
}

/// Walks over a list, and reads it again if it is short.
fn read_array(cursor: &mut Cursor<'_>, key: &str) -> Result<Array> {
    let mut array = walk_array(cursor, key, 1)?;
    let bytes = array.range.end - array.range.start;
    if array.element != ValueType::Array && array.count <= KEPT_ELEMENTS && bytes <= KEPT_BYTES {
        let mut again = cursor.again(array.range.clone());
        let values = (0..array.count).map(|_| read_value(&mut again, key, array.element, bytes));
        array.kept = Some(values.collect::<Result<_>>()?);
    }
    Ok(array)
}

/// Passes over a list and everything in it.
fn walk_array(cursor: &mut Cursor<'_>, key: &str, depth: u32) -> Result<Array> {
    let place = Place::Value(key);
    let number = cursor.u32(place)?;
    let element = value_type(cursor, key, number)?;
    let count = cursor.u64(place)?;
    cursor.check_count(|| format!("elements in {key:?}"), count, element.least())?;
    let start = cursor.position();
    match element {
        ValueType::Text => {
            for _ in 0..count {
                cursor.skip_bytes(place)?;
            }
        }
        ValueType::Array if depth == MAX_DEPTH => {
            let (place, what, limit) = (place.words(), "levels of lists", u64::from(MAX_DEPTH));
            return cursor.fail(GgufProblem::Limit { place, what, value: limit + 1, limit });
        }
        ValueType::Array => {
            for _ in 0..count {
                walk_array(cursor, key, depth + 1)?;
            }
        }
        // The count was compared with the bytes left, so the product cannot overflow.
        fixed => cursor.skip(count * fixed.least(), place)?,
    }
    Ok(Array { element, count, range: start..cursor.position(), kept: None })
}
