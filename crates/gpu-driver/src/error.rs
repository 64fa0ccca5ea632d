//! What can go wrong at the seam, with what was asked and what the driver answered.

use crate::types::Bytes;

/// The result of a driver verb.
pub type Result<T, E = DriverError> = std::result::Result<T, E>;

/// A refusal or failure of a device driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// There is no CUDA driver library on this machine.
    #[error("no CUDA driver library was found; install the NVIDIA driver or use the host device")]
    LibraryMissing,
    /// The driver library lacks a function this crate needs.
    #[error("the CUDA driver has no function {symbol}; driver 12.0 (525) or newer is needed")]
    SymbolMissing {
        /// The missing function.
        symbol: &'static str,
    },
    /// The driver is too old.
    #[error("the CUDA driver is version {found}, {needed} or newer is needed; update the NVIDIA driver")]
    DriverTooOld {
        /// Its version as it numbers itself (12080 is 12.8).
        found: u32,
        /// The oldest that works.
        needed: u32,
    },
    /// There is no such device.
    #[error("there is no CUDA device {asked}; this machine has {count}")]
    NoSuchDevice {
        /// The ordinal that was asked for.
        asked: u32,
        /// How many there are.
        count: u32,
    },
    /// The device cannot do something that streaming needs.
    #[error("device {device} does not support {feature}")]
    Unsupported {
        /// The device's name.
        device: String,
        /// What it lacks.
        feature: &'static str,
    },
    /// Device memory ran out.
    #[error("out of device memory: asked for {asked}, {free} free of {total}")]
    OutOfMemory {
        /// What was asked for.
        asked: Bytes,
        /// What was free just after.
        free: Bytes,
        /// All there is.
        total: Bytes,
    },
    /// An argument breaks the verb's contract; nothing was done.
    #[error("{call} was given {what}")]
    InvalidArgument {
        /// The verb.
        call: &'static str,
        /// What was wrong, with the values.
        what: String,
    },
    /// A driver call failed. The name was read when it failed, since asking later may itself fail.
    #[error("{call} failed with {name} ({code}){detail}")]
    Call {
        /// The driver function.
        call: &'static str,
        /// The driver's code, kept as a number: newer drivers have codes these bindings do not know.
        code: u32,
        /// The code's name, or "unknown".
        name: String,
        /// Sizes and addresses of the call, beginning with a separator, or empty.
        detail: String,
    },
    /// The operating system refused.
    #[error("{call} failed: {message}")]
    System {
        /// The system call.
        call: &'static str,
        /// The system's text.
        message: String,
    },
    /// The device runs no kernels: it is the emulator.
    #[error("{device} runs no kernels; compute on the host")]
    NoKernels {
        /// The device's name.
        device: String,
    },
    /// The driver did not take a module: its PTX is newer than the driver, or made for another device.
    #[error("the driver refused a module of kernels with {name} ({code}): {log}")]
    ModuleRefused {
        /// The driver's code.
        code: u32,
        /// The code's name, or "unknown".
        name: String,
        /// What its compiler says.
        log: String,
    },
    /// A failure made on purpose by [`Faulty`](crate::Faulty).
    #[error("{verb} call {index} was made to fail")]
    Injected {
        /// The verb.
        verb: &'static str,
        /// Which call of it, from 0.
        index: u64,
    },
}
