//! Everything the facade can refuse, by which crate refused it.
#![forbid(unsafe_code)]

use gpu_driver::{Bytes, DriverError};
use offload_core::{EngineError, PlanError};
use pinned_pool::HostError;
use vmm_alloc::VmmError;

/// The result of a facade call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A refusal or failure. Nothing is half done when one is returned.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A budget that cannot be one.
    #[error("the budget {given} cannot be used: {reason}")]
    Budget {
        /// The budget as it was given.
        given: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor number the model does not have.
    #[error("tensor {tensor} does not exist; the model has {count}")]
    NoSuchTensor {
        /// The number.
        tensor: u32,
        /// How many there are.
        count: usize,
    },
    /// A tensor was handed over with a size that is not its own.
    #[error("{name} was described with {described} and handed over with {given}")]
    WrongSize {
        /// The tensor.
        name: String,
        /// Its size in the description.
        described: Bytes,
        /// The size of the bytes.
        given: Bytes,
    },
    /// Tensors were not handed over before the start.
    #[error(
        "{missing} of {count} tensors were not handed over, the first is {first}; hand over every tensor, then start"
    )]
    Missing {
        /// How many.
        missing: usize,
        /// Of how many.
        count: usize,
        /// The name of the first.
        first: String,
    },
    /// A tensor could not be read on its way to the device. After that, a new step starts over.
    #[error("{name} could not be read: {cause}")]
    Unread {
        /// The tensor; if several lie side by side in a file, the first of them.
        name: String,
        /// Why.
        #[source]
        cause: HostError,
    },
    /// A model cannot run while another of its device is in the middle of a step or held.
    #[error(
        "{model} cannot run now: {other}, which shares its device, is running or held; models that share a device run one after the other"
    )]
    Busy {
        /// The model that was asked for.
        model: String,
        /// The one that is in the way.
        other: String,
    },
    /// A model cannot run beside those that never leave the device.
    #[error("{}", crowded(model, *needed, staying, *taken, *limit))]
    Crowded {
        /// The model that was asked for.
        model: String,
        /// The most that it may take.
        needed: Bytes,
        /// Those that stay, by name.
        staying: String,
        /// The most that they may take.
        taken: Bytes,
        /// The most that all models may take.
        limit: Bytes,
    },
    /// The model cannot be planned.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// Host memory was refused.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Device memory was refused.
    #[error(transparent)]
    Memory(#[from] VmmError),
    /// The device's driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Who wants how much of a device that has less.
fn crowded(model: &str, needed: Bytes, staying: &str, taken: Bytes, limit: Bytes) -> String {
    if staying.is_empty() {
        return format!(
            "{model} may take {needed} of the device, whose models may take {limit}: lower its budget"
        );
    }
    format!(
        "{model} may take {needed} of the device, and {staying}, which stay, {taken}; together they may take {limit}: lower a budget, or let models leave"
    )
}
