//! Which Python class stands for which error, and the boundary that panics do not cross.

use std::panic::{AssertUnwindSafe, catch_unwind};

use checkpoint::CheckpointError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use quant_kernels::KernelError;
use quant_router::QuantError;
use startup_timing::TimingError;
use weightstream::{DriverError, EngineError, Error, HostError, PlanError};

/// The class of an error, by its name in `weightstream.errors`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Budget,
    Model,
    Device,
    State,
    Checkpoint,
    Quantization,
    NotAvailable,
    Cancelled,
    Profile,
    Timing,
    Internal,
}

impl Class {
    const fn name(self) -> &'static str {
        match self {
            Self::Budget => "BudgetError",
            Self::Model => "ModelError",
            Self::Device => "DeviceError",
            Self::State => "StateError",
            Self::Checkpoint => "CheckpointError",
            Self::Quantization => "QuantizationError",
            Self::NotAvailable => "NotAvailableError",
            Self::Cancelled => "LoadingCancelled",
            Self::Profile => "ProfileError",
            Self::Timing => "TimingError",
            Self::Internal => "InternalError",
        }
    }
}

/// An error on its way to Python: made without the interpreter, raised with it.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) class: Class,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(class: Class, text: impl Into<String>) -> Self {
        Self { class, text: text.into() }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let class = match &error {
            Error::Budget { .. } | Error::Crowded { .. } | Error::Plan(PlanError::BudgetTooSmall { .. }) => {
                Class::Budget
            }
            Error::Busy { .. } => Class::State,
            Error::Plan(PlanError::ModelTooLarge { .. }) => Class::Model,
            Error::Engine(engine) => of_engine(engine),
            Error::Host(host) | Error::Unread { cause: host, .. } => of_host(host),
            Error::Plan(PlanError::BadGranule { .. }) | Error::Memory(_) | Error::Driver(_) => Class::Device,
            _ => Class::Internal,
        };
        Self { class, text: error.to_string() }
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Self {
        Self::new(Class::Device, error.to_string())
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        let cancelled = matches!(error, CheckpointError::Cancelled);
        Self::new(if cancelled { Class::Cancelled } else { Class::Checkpoint }, error.to_string())
    }
}

impl From<TimingError> for Failure {
    fn from(error: TimingError) -> Self {
        Self::new(Class::Timing, error.to_string())
    }
}

impl From<QuantError> for Failure {
    fn from(error: QuantError) -> Self {
        Self::new(Class::Quantization, error.to_string())
    }
}

/// What the caller can compute in another way is not available; everything else is what it is.
impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Self {
        let class = match error {
            KernelError::Quant(error) => return error.into(),
            KernelError::Unsupported { .. }
            | KernelError::Misaligned { .. }
            | KernelError::Driver(DriverError::NoKernels { .. } | DriverError::ModuleRefused { .. }) => {
                Class::NotAvailable
            }
            _ => Class::Device,
        };
        Self::new(class, error.to_string())
    }
}

fn of_engine(error: &EngineError) -> Class {
    match error {
        EngineError::Conflict { .. }
        | EngineError::OtherThread
        | EngineError::InStep { .. }
        | EngineError::NoStep
        | EngineError::Held { .. }
        | EngineError::Capturing { .. }
        | EngineError::StepFailed
        | EngineError::Closed => Class::State,
        EngineError::PageLimit { .. } => Class::Budget,
        EngineError::Host(host) | EngineError::Unread { cause: host, .. } => of_host(host),
        EngineError::Memory(_) | EngineError::Driver(_) => Class::Device,
        _ => Class::Internal,
    }
}

/// What is wrong with host memory, or with the file that stands for it.
fn of_host(error: &HostError) -> Class {
    match error {
        HostError::Cancelled => Class::Cancelled,
        HostError::FileChanged { .. }
        | HostError::FileRead { .. }
        | HostError::OutsideFile { .. }
        | HostError::Unread { .. } => Class::Checkpoint,
        _ => Class::Device,
    }
}

impl From<HostError> for Failure {
    fn from(error: HostError) -> Self {
        Self::new(of_host(&error), error.to_string())
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| {
            let raised = py
                .import("weightstream.errors")
                .and_then(|module| module.getattr(failure.class.name()))
                .and_then(|class| class.call1((failure.text.as_str(),)));
            match raised {
                Ok(error) => Self::from_value(error),
                // The package is broken or half torn down: the text still gets out.
                Err(_) => PyRuntimeError::new_err(failure.text),
            }
        })
    }
}

/// Runs `call`, turning a panic into an error: no panic crosses into Python.
pub(crate) fn guarded<T>(call: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".into());
        Err(Failure::new(Class::Internal, format!("internal error: {text}; please report this")))
    })
}

#[cfg(test)]
mod tests {
    #![expect(clippy::unwrap_used, clippy::panic, reason = "tests")]
    use super::*;

    #[test]
    fn refusals_have_the_class_that_says_who_can_mend_them() {
        let class = |error: Error| Failure::from(error).class;
        assert_eq!(class(Error::Budget { given: "-1".into(), reason: "r".into() }), Class::Budget);
        assert_eq!(class(EngineError::OtherThread.into()), Class::State);
        assert_eq!(class(EngineError::Closed.into()), Class::State);
        assert_eq!(class(DriverError::LibraryMissing.into()), Class::Device);
        assert_eq!(class(EngineError::Internal { what: "w" }.into()), Class::Internal);
        assert_eq!(Failure::from(CheckpointError::Cancelled).class, Class::Cancelled);
        let folder = CheckpointError::NotAFile { path: "p".into() };
        assert_eq!(Failure::from(folder).class, Class::Checkpoint);
        assert_eq!(class(HostError::Cancelled.into()), Class::Cancelled);
        let refused = DriverError::ModuleRefused { code: 222, name: "n".into(), log: "l".into() };
        assert_eq!(Failure::from(KernelError::from(refused)).class, Class::NotAvailable);
        let launch =
            DriverError::Call { call: "cuLaunchKernel", code: 700, name: "n".into(), detail: String::new() };
        assert_eq!(Failure::from(KernelError::from(launch)).class, Class::Device);
        assert_eq!(class(Error::NoSuchTensor { tensor: 1, count: 1 }), Class::Internal);
    }

    #[test]
    fn a_panic_is_an_error_with_its_text() {
        let failure = guarded::<()>(|| panic!("the {} broke", "axle")).unwrap_err();
        assert_eq!(failure.class, Class::Internal);
        assert!(failure.text.contains("the axle broke"), "{}", failure.text);
    }
}
