//! The decisions of preloading, as Python asks for them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use weightstream::{Bytes, Preload as Policy, Room};

/// The preloading of one model: decides, and does nothing.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Preload {
    policy: Mutex<Policy>,
}

impl Preload {
    fn policy(&self) -> MutexGuard<'_, Policy> {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Preload {
    #[new]
    fn new(most: u64, margin: u64) -> Self {
        Self { policy: Mutex::new(Policy::new(Bytes(most), Bytes(margin))) }
    }

    fn need(&self, workload: &str) -> Option<u64> {
        self.policy().need(workload).map(|bytes| bytes.0)
    }

    fn learn(&self, workload: &str, need: u64) {
        self.policy().learn(workload, Bytes(need));
    }

    fn pressed(&self, workload: &str, bytes: u64) -> u64 {
        self.policy().pressed(workload, Bytes(bytes)).0
    }

    /// Gives the budget, whether to measure the step, and whether to ask again once the allocator gave back what it keeps.
    fn begin(&self, workload: &str, free: u64, cached: u64, budget: u64, least: u64) -> (u64, bool, bool) {
        let room =
            Room { free: Bytes(free), cached: Bytes(cached), budget: Bytes(budget), least: Bytes(least) };
        let decision = self.policy().begin(workload, room);
        (decision.budget.0, decision.measure, decision.trim)
    }
}
