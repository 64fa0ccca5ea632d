//! What can go wrong between a quantized weight on a device and its numbers. Whatever it is, no kernel was submitted that reads or
//! writes outside what was given; who gets [`KernelError::Unsupported`] or [`KernelError::Misaligned`] can compute another way.

use gpu_driver::{DeviceAddress, DriverError};
use quant_router::QuantError;

/// The result of planning or submitting kernels.
pub type Result<T, E = KernelError> = std::result::Result<T, E>;

/// A refusal of this crate, or of what it stands on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The weight's description, its parts or the rows do not fit together.
    #[error(transparent)]
    Quant(#[from] QuantError),
    /// There is no kernel for this weight.
    #[error("no kernel decodes {layer:?}, {format}: {why}")]
    Unsupported {
        /// The layer.
        layer: String,
        /// Its format.
        format: String,
        /// What is out of the ordinary.
        why: &'static str,
    },
    /// Memory that does not begin where the device could read or write its numbers.
    #[error("{what} of {layer:?} is at {:#x}, which is no multiple of {need}", address.0)]
    Misaligned {
        /// The layer.
        layer: String,
        /// The tensor, or that it is the target.
        what: String,
        /// Where it is.
        address: DeviceAddress,
        /// What its address has to be a multiple of, in bytes.
        need: u64,
    },
}
