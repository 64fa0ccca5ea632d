#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod dequantize;
pub mod detect;
mod error;
pub mod formats;
pub mod ggml;
mod parts;
pub mod quantize;
mod weight;

pub use dequantize::{Decode, Target, dequantize};
pub use error::{QuantError, Result};
pub use parts::Parts;
pub use quantize::{QuantBuffers, QuantKind, Quantizer};
pub use weight::{Format, Part, PartRole, QuantWeight, Transform, kind_from_name};
