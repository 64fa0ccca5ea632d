//! The formats whose scales lie beside the packed numbers: what describes each, and its decoder.

pub(crate) mod bnb;
pub(crate) mod grid;
pub mod numbers;
pub(crate) mod nunchaku;
pub(crate) mod packed_int;
pub(crate) mod quanto;
pub(crate) mod rotation;
pub(crate) mod scaled;
pub(crate) mod w4a8;

pub use bnb::{Bnb4, BnbKind, Nested};
pub use grid::Order;
pub use numbers::Number;
pub use nunchaku::{Svdq, SvdqKind};
pub(crate) use packed_int::words_of;
pub use packed_int::{PackedInt, Words};
pub use quanto::QuantoBits;
pub use rotation::{is_rotatable, rotate};
pub use scaled::{Codes, Family, Global, Scaled, Scales};
pub use w4a8::W4A8;
