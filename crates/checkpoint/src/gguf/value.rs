//! The values of a GGUF file's metadata. A list is where it lies in the file; only short ones are kept in RAM.

use std::fmt;
use std::ops::Range;

/// The type of a value, as GGUF numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names say all there is to say")]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Text,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    const ALL: [Self; 13] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::Bool,
        Self::Text,
        Self::Array,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// The type with this number in a file.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get(number as usize).copied()
    }

    /// Bytes of one value; none for text and lists, which say their own length.
    pub fn size(self) -> Option<u64> {
        match self {
            Self::U8 | Self::I8 | Self::Bool => Some(1),
            Self::U16 | Self::I16 => Some(2),
            Self::U32 | Self::I32 | Self::F32 => Some(4),
            Self::U64 | Self::I64 | Self::F64 => Some(8),
            Self::Text | Self::Array => None,
        }
    }

    /// The fewest bytes that one value takes in a file.
    pub(super) fn least(self) -> u64 {
        match self {
            Self::Text => 8,
            Self::Array => 4 + 8,
            fixed => fixed.size().unwrap_or(1),
        }
    }
}

/// A list: its elements' type and number, and where they lie.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// What its elements are.
    pub element: ValueType,
    /// How many there are.
    pub count: u64,
    /// Their bytes in the file, from the file's start.
    pub range: Range<u64>,
    pub(super) kept: Option<Vec<Value>>,
}

impl Array {
    /// The elements, if the list was short enough to be kept. [`GgufHeader::elements`](super::GgufHeader::elements)
    /// reads the others.
    pub fn values(&self) -> Option<&[Value]> {
        self.kept.as_deref()
    }
}

/// One value of a file's metadata.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs, reason = "the names are the types'")]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    Text(String),
    /// Text that is not UTF-8, which the format asks for.
    Bytes(Vec<u8>),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// An integer of any width that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Self::U8(value) => Some(value.into()),
            Self::U16(value) => Some(value.into()),
            Self::U32(value) => Some(value.into()),
            Self::U64(value) => Some(value),
            Self::I8(value) => value.try_into().ok(),
            Self::I16(value) => value.try_into().ok(),
            Self::I32(value) => value.try_into().ok(),
            Self::I64(value) => value.try_into().ok(),
            _ => None,
        }
    }

    /// Text.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// A list.
    pub fn as_array(&self) -> Option<&Array> {
        match self {
            Self::Array(array) => Some(array),
            _ => None,
        }
    }

    /// What it is, for errors: `text`, `a list of 3 I32`, `5 (U32)`.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Text(_) | Self::Bytes(_) => "text".into(),
            Self::Array(array) => format!("a list of {} {:?}", array.count, array.element),
            number => format!("{number} ({:?})", number.kind()),
        }
    }

    /// Bytes of RAM beyond the value itself.
    pub(super) fn heap(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Bytes(bytes) => bytes.len(),
            Self::Array(array) => array
                .kept
                .as_ref()
                .map_or(0, |kept| kept.iter().map(|value| size_of::<Self>() + value.heap()).sum()),
            _ => 0,
        }
    }

    fn kind(&self) -> ValueType {
        match self {
            Self::U8(_) => ValueType::U8,
            Self::I8(_) => ValueType::I8,
            Self::U16(_) => ValueType::U16,
            Self::I16(_) => ValueType::I16,
            Self::U32(_) => ValueType::U32,
            Self::I32(_) => ValueType::I32,
            Self::F32(_) => ValueType::F32,
            Self::Bool(_) => ValueType::Bool,
            Self::Text(_) | Self::Bytes(_) => ValueType::Text,
            Self::Array(_) => ValueType::Array,
            Self::U64(_) => ValueType::U64,
            Self::I64(_) => ValueType::I64,
            Self::F64(_) => ValueType::F64,
        }
    }
}

/// Text as it is, numbers in decimal, kept lists as JSON, others as what they are.
impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::U8(value) => value.fmt(f),
            Self::I8(value) => value.fmt(f),
            Self::U16(value) => value.fmt(f),
            Self::I16(value) => value.fmt(f),
            Self::U32(value) => value.fmt(f),
            Self::I32(value) => value.fmt(f),
            Self::F32(value) => value.fmt(f),
            Self::Bool(value) => value.fmt(f),
            Self::Text(text) => f.write_str(text),
            Self::Bytes(bytes) => f.write_str(&String::from_utf8_lossy(bytes)),
            Self::Array(array) => array.fmt(f),
            Self::U64(value) => value.fmt(f),
            Self::I64(value) => value.fmt(f),
            Self::F64(value) => value.fmt(f),
        }
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(kept) = &self.kept else {
            return write!(f, "{} values of type {:?}", self.count, self.element);
        };
        f.write_str("[")?;
        for (index, value) in kept.iter().enumerate() {
            if index > 0 {
                f.write_str(",")?;
            }
            match value {
                Value::Text(_) | Value::Bytes(_) => {
                    write!(f, "{}", serde_json::Value::String(value.to_string()))?;
                }
                number => number.fmt(f)?,
            }
        }
        f.write_str("]")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_numbers_of_the_format() {
        for (number, kind) in
            [(0, ValueType::U8), (8, ValueType::Text), (9, ValueType::Array), (12, ValueType::F64)]
        {
            assert_eq!(ValueType::from_number(number), Some(kind));
        }
        assert_eq!(ValueType::from_number(13), None);
        assert_eq!(ValueType::from_number(u32::MAX), None);
    }

    #[test]
    fn integers_of_every_width_count_alike() {
        for value in [Value::U8(7), Value::I8(7), Value::U16(7), Value::I16(7), Value::U32(7), Value::I32(7)]
        {
            assert_eq!(value.as_u64(), Some(7));
        }
        assert_eq!(Value::I64(-1).as_u64(), None);
        assert_eq!(Value::F32(7.0).as_u64(), None);
    }

    #[test]
    fn short_lists_print_as_json() {
        let kept = vec![Value::Text("a\"b".into()), Value::Text("c".into())];
        let mut array = Array { element: ValueType::Text, count: 2, range: 0..20, kept: Some(kept) };
        assert_eq!(array.to_string(), r#"["a\"b","c"]"#);
        array.kept = None;
        assert_eq!(array.to_string(), "2 values of type Text");
        assert_eq!(Value::F32(0.1).to_string(), "0.1");
    }
}
