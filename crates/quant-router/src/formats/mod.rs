//! The formats whose scales lie beside the packed numbers: what describes each, and its decoder.

pub(crate) mod grid;
pub mod numbers;
pub(crate) mod rotation;
pub(crate) mod scaled;

pub use grid::Order;
pub use numbers::Number;
pub use rotation::{is_rotatable, rotate};
pub use scaled::{Codes, Family, Global, Scaled, Scales};
