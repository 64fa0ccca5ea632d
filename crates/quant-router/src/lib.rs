#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![allow(
    clippy::inline_always,
    reason = "only what is inlined into a loop is compiled for wide vectors, see `widest`"
)]

mod dequantize;
pub mod detect;
mod error;
pub mod formats;
pub mod ggml;
mod parts;
pub mod quantize;
mod weight;
mod widest;

pub use dequantize::{Decode, Target, check, dequantize};
pub use error::{QuantError, Result};
pub use parts::Parts;
pub use quantize::{QuantBuffers, QuantKind, Quantizer};
pub use weight::{Format, Part, PartRole, QuantWeight, Transform, kind_from_name};
