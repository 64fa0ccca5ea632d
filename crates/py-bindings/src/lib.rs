#![doc = include_str!("../README.md")]
//! The Python module `weightstream._native`: a thin mirror of the Rust facade. It converts and decides nothing,
//! but for `Turns`, which opens and closes a unit's turn around a forward: as Python that costs several times as much.
//!
//! Every class is frozen, with locks inside, so that it is sound from any thread. No panic crosses into Python: each
//! call is guarded, and an error is raised as a class of `weightstream.errors`. What each class and function means is
//! said once, in `_native.pyi` beside the package.

mod adapters;
mod allocations;
mod checkpoint;
mod device;
mod dlpack;
mod error;
mod kernels;
mod offloader;
mod plan;
mod preload;
mod process;
mod profiles;
mod quant;
mod reserve;
mod saving;
mod share;
mod sources;
mod startup;
mod turns;
mod watched;

use pyo3::prelude::*;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<device::Device>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<offloader::Offloader>()?;
    module.add_class::<offloader::Hold>()?;
    module.add_class::<share::Share>()?;
    module.add_class::<turns::Turns>()?;
    module.add_class::<preload::Preload>()?;
    module.add_class::<allocations::Allocations>()?;
    module.add_class::<device::Occupied>()?;
    module.add_class::<checkpoint::Checkpoint>()?;
    module.add_class::<quant::QuantWeight>()?;
    module.add_class::<quant::Quantizer>()?;
    module.add_class::<kernels::DeviceKernels>()?;
    module.add_class::<adapters::AdapterPlan>()?;
    module.add_class::<adapters::AdapterTarget>()?;
    module.add_function(wrap_pyfunction!(adapters::not_finite, module)?)?;
    module.add_function(wrap_pyfunction!(quant::handlers, module)?)?;
    module.add_function(wrap_pyfunction!(quant::claims, module)?)?;
    module.add_function(wrap_pyfunction!(quant::detect, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::read_mapped, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::mapped, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::check_mapped, module)?)?;
    module.add_function(wrap_pyfunction!(reserve::share_reserved, module)?)?;
    module.add_function(wrap_pyfunction!(saving::save, module)?)?;
    module.add_function(wrap_pyfunction!(profiles::profile_folder, module)?)?;
    module.add_function(wrap_pyfunction!(profiles::profile_key, module)?)?;
    module.add_function(wrap_pyfunction!(profiles::profile_load, module)?)?;
    module.add_function(wrap_pyfunction!(profiles::profile_update, module)?)?;
    module.add_class::<startup::StartupRecorder>()?;
    module.add_class::<startup::StartupReport>()?;
    module.add_function(wrap_pyfunction!(startup::startup_stats, module)?)?;
    module.add_function(wrap_pyfunction!(startup::startup_diff, module)?)?;
    module.add_function(wrap_pyfunction!(checkpoint::resident_fraction, module)?)?;
    module.add_function(wrap_pyfunction!(device::parse_bytes, module)?)
}
