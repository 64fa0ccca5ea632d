//! Quantizing on the fly: weights of floats become the types of optimum-quanto, number for number as that library makes them. What
//! comes out is described like what is found in files, so that all else is shared with them.

mod affine;
mod encode;
mod plan;
mod source;
mod symmetric;

use std::fmt;

use serde::{Serialize, Serializer};

pub use plan::{QuantBuffers, Quantizer};

/// A type of optimum-quanto that weights can be quantized to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantKind {
    /// Bytes with a sign, and a scale a row.
    QInt8,
    /// FP8 with four bits of exponent, and a scale a row.
    QFloat8E4m3,
    /// FP8 with five bits of exponent, and a scale a row.
    QFloat8E5m2,
    /// Numbers of 4 bits in groups of up to 128, each with a scale and a shift.
    QInt4,
    /// Numbers of 2 bits, likewise.
    QInt2,
}

impl QuantKind {
    /// All there are.
    pub const ALL: [Self; 5] = [Self::QInt8, Self::QFloat8E4m3, Self::QFloat8E5m2, Self::QInt4, Self::QInt2];

    /// Its name in a map of quantized modules.
    pub fn name(self) -> &'static str {
        match self {
            Self::QInt8 => "qint8",
            Self::QFloat8E4m3 => "qfloat8_e4m3fn",
            Self::QFloat8E5m2 => "qfloat8_e5m2",
            Self::QInt4 => "qint4",
            Self::QInt2 => "qint2",
        }
    }

    /// The type with this name; `qfloat8` is short for the one with four bits of exponent.
    pub fn of(name: &str) -> Option<Self> {
        let name = if name == "qfloat8" { "qfloat8_e4m3fn" } else { name };
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// The largest number of a type of a byte.
    fn limit(self) -> f32 {
        match self {
            Self::QFloat8E4m3 => 448.0,
            Self::QFloat8E5m2 => 57344.0,
            _ => 127.0,
        }
    }

    /// Bits of a packed number.
    pub fn bits(self) -> u32 {
        match self {
            Self::QInt4 => 4,
            Self::QInt2 => 2,
            _ => 8,
        }
    }
}

impl fmt::Display for QuantKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for QuantKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}
