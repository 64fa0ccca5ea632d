#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;
mod file;
mod finite;
mod key;
mod kinds;
mod layers;
mod names;
mod plan;
pub mod reference;
mod resolve;

pub use error::{LoraError, Result};
pub use file::{AdapterFile, AdapterTensor};
pub use finite::{NotFinite, not_finite};
pub use key::{AdapterKey, Role, parse_key};
pub use layers::{Layer, LayerKind, Layers};
pub use plan::{Absent, AdapterKind, AdapterPlan, AdapterTarget, Part, Refused};
pub use resolve::{ResolveOptions, resolve};
