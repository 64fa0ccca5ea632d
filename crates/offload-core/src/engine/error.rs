//! Why the engine refused a call or failed in one.
#![forbid(unsafe_code)]

use gpu_driver::{Bytes, DriverError, StreamHandle};
use pinned_pool::HostError;
use vmm_alloc::VmmError;

use crate::model::{TensorId, UnitId};
use crate::schedule::ScheduleError;

/// The result of an engine call.
pub(super) type Result<T, E = EngineError> = std::result::Result<T, E>;

/// A refusal or failure of the [`Engine`](crate::Engine).
///
/// After a refusal the engine is as before. After a failure of the driver inside a step, the next
/// [`begin_step`](crate::Engine::begin_step) starts over from a known state.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// A unit cannot be copied while another that shares its memory is in use.
    #[error(
        "{unit} cannot be used while {open} is in use: they share ring memory; leave that one first or raise the budget"
    )]
    Conflict {
        /// The unit that was asked for.
        unit: String,
        /// The unit that is open or held.
        open: String,
    },
    /// A unit number that the plan does not have, or a leave or release without its counterpart.
    #[error(transparent)]
    Visit(ScheduleError),
    /// Another thread is in the middle of a step.
    #[error(
        "this model is running on another thread; run one step at a time, or attach a copy of the model for each"
    )]
    OtherThread,
    /// The call is possible between steps only.
    #[error("{call} is possible between steps only; end the step first")]
    InStep {
        /// The call.
        call: &'static str,
    },
    /// A step was ended that was not begun.
    #[error("a step was ended that this thread did not begin")]
    NoStep,
    /// The call is not possible while a unit is held.
    #[error("{call} is not possible while unit {} is held; release it first", unit.0)]
    Held {
        /// The call.
        call: &'static str,
        /// A unit that is held.
        unit: UnitId,
    },
    /// Someone else's graph capture would record copies that are right only once.
    #[error("stream {:#x} is being captured into a graph; streamed weights cannot be used in a capture", stream.0)]
    Capturing {
        /// The stream.
        stream: StreamHandle,
    },
    /// An earlier call of this step failed.
    #[error("an earlier call of this step failed; begin a new step to start over")]
    StepFailed,
    /// The plan is not of this model's address line.
    #[error("the plan does not fit the model: {what}")]
    ForeignPlan {
        /// What does not fit.
        what: String,
    },
    /// The plan needs more pages than the pool allows. Nothing was changed.
    #[error("the plan needs {needed} of pages, the page limit is {limit}; raise the limit or plan for it")]
    PageLimit {
        /// What the plan needs.
        needed: Bytes,
        /// What the pool allows.
        limit: Bytes,
    },
    /// The host memory given does not have all bytes of a tensor.
    #[error("tensor {} has no source for all of its {bytes}; place every tensor before starting", tensor.0)]
    NoSource {
        /// The tensor.
        tensor: TensorId,
        /// Its size.
        bytes: Bytes,
    },
    /// Bytes of a tensor could not be read on their way to the device: its file was cut, changed or cannot be read.
    #[error("tensor {} could not be read: {cause}", tensor.0)]
    Unread {
        /// The tensor; if several lie side by side in a file, the first of them.
        tensor: TensorId,
        /// Why.
        #[source]
        cause: HostError,
    },
    /// A source is to be read by a device that this engine does not drive.
    #[error("a source is read by device {reader}, but this engine drives device {device}")]
    ForeignReader {
        /// The device the source names.
        reader: u32,
        /// The engine's device.
        device: u32,
    },
    /// The engine was closed.
    #[error("the model was detached; attach it again to run it")]
    Closed,
    /// Addresses or pages: refused by the page limit or by the driver.
    #[error(transparent)]
    Memory(#[from] VmmError),
    /// Host memory, or a copy from it.
    #[error(transparent)]
    Host(#[from] HostError),
    /// The driver.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A broken promise between the engine's own parts.
    #[error("internal error: {what}; please report this")]
    Internal {
        /// Which promise.
        what: &'static str,
    },
}
