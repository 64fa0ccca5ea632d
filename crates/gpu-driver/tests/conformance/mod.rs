//! What every driver must do, run on the emulator in all its orders and on CUDA where there is a GPU.
//!
//! Each check takes a driver alone and gives back all it made, so that a caller may count what is left.
#![allow(dead_code, unused_imports, reason = "each test binary uses its own part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block, reason = "tests drive the unsafe verbs")]

mod copies;
mod host_memory;
mod kernels;
mod mapping;
mod rig;
mod streams;

use gpu_driver::Driver;

pub(crate) use rig::{HostBuffer, Mapped};

/// A check's name and body.
pub(crate) type Check = (&'static str, fn(&dyn Driver));

/// All checks, by topic.
pub(crate) fn all() -> Vec<Check> {
    [mapping::CHECKS, copies::CHECKS, streams::CHECKS, host_memory::CHECKS, kernels::CHECKS].concat()
}

/// Runs every check.
pub(crate) fn run(driver: &dyn Driver) {
    for (name, check) in all() {
        let before = driver.memory_info().unwrap();
        check(driver);
        let after = driver.memory_info().unwrap();
        assert_eq!(before.total, after.total, "{name} changed the device's size");
    }
}
