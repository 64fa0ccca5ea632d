//! The formats of Nunchaku: numbers of 4 bits in the order in which its kernels read them, and what is added to them.

mod awq;
mod order;
mod svdq;

pub use svdq::{Svdq, SvdqKind};

pub(crate) use awq::decoder as awq_decoder;
pub(crate) use svdq::decoder as svdq_decoder;

/// Columns of an AWQ group.
pub(crate) const AWQ_GROUP: u64 = 64;
/// Rows, and columns of a pair of tiles, that weights are padded to.
pub(crate) const TILE: u64 = 128;
/// Ranks that are packed together.
pub(crate) const RANKS: u64 = 16;
