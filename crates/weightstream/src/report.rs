//! An offloader in numbers: the device, the plan, host memory and what was done.
#![forbid(unsafe_code)]

use std::sync::Arc;

use gpu_driver::{DeviceKind, Driver};
use offload_core::{Engine, EngineReport, ModelDesc, PlanNote};
use pinned_pool::HostStore;
use serde::Serialize;

/// A moment's view of an [`Offloader`](crate::Offloader). All sizes are in bytes.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// "cuda" or "host".
    pub device: &'static str,
    /// The device as the driver numbers it.
    pub ordinal: u32,
    /// Its name.
    pub device_name: String,
    /// The weights and buffers, padding not counted.
    pub model_bytes: u64,
    /// How many tensors they are.
    pub tensors: usize,
    /// Those that are always resident because they lie outside every tower.
    pub base_bytes: u64,
    /// Expected to be copied in one step.
    pub streamed_bytes_per_step: u64,
    /// What the planner has to say.
    pub notes: Vec<String>,
    /// Host memory.
    pub host: HostReport,
    /// The engine: units, pages and counts.
    pub engine: EngineReport,
}

/// Where the weights are in host memory.
#[derive(Debug, Clone, Serialize)]
pub struct HostReport {
    /// Page-locked where the page cache has their file.
    pub mapped_bytes: u64,
    /// Page-locked where their owner had them.
    pub in_place_bytes: u64,
    /// Copied into page-locked memory of ours.
    pub slab_bytes: u64,
    /// In memory, and not page-locked: they reach the device through a staging ring.
    pub pageable_bytes: u64,
    /// In files, and not page-locked: read into a staging ring when they are needed.
    pub file_bytes: u64,
    /// Really page-locked, whole pages.
    pub registered_bytes: u64,
    /// In how many registrations.
    pub registrations: usize,
    /// What was refused and what was done instead, once a level.
    pub step_downs: Vec<String>,
}

impl Report {
    pub(crate) fn new(
        driver: &Arc<dyn Driver>,
        engine: &Engine,
        model: &ModelDesc,
        store: &HostStore,
    ) -> Self {
        let info = driver.device_info();
        let plan = engine.plan();
        let layout = engine.layout();
        Self {
            device: match info.kind {
                DeviceKind::Cuda => "cuda",
                DeviceKind::Host => "host",
            },
            ordinal: info.ordinal.0,
            device_name: info.name.clone(),
            model_bytes: layout.model_bytes().0,
            tensors: model.tensors.len(),
            base_bytes: model.base.iter().map(|&tensor| layout.bytes(tensor).0).sum(),
            streamed_bytes_per_step: plan.streamed_bytes_per_step().0,
            notes: plan.notes.iter().map(note).collect(),
            host: HostReport::new(store),
            engine: engine.report(),
        }
    }
}

impl HostReport {
    fn new(store: &HostStore) -> Self {
        let report = store.report();
        let step_down = |step: &pinned_pool::StepDown| {
            format!(
                "{:?} was refused {} times, {:?} is used instead: {}",
                step.from, step.times, step.to, step.reason
            )
        };
        Self {
            mapped_bytes: report.mapped.0,
            in_place_bytes: report.in_place.0,
            slab_bytes: report.slab.0,
            pageable_bytes: report.pageable.0,
            file_bytes: report.in_files.0,
            registered_bytes: report.registered.0,
            registrations: report.registrations,
            step_downs: report.step_downs.iter().map(step_down).collect(),
        }
    }
}

/// A planner's note in a sentence.
fn note(note: &PlanNote) -> String {
    match note {
        PlanNote::EverythingResident => "the whole model is resident: nothing is copied in a step".into(),
        PlanNote::OneSlot { unit, two_slots } => {
            let what = match two_slots {
                Some(budget) => format!("a budget of {budget} would overlap them"),
                None => "overlapping them would copy more and take longer".into(),
            };
            format!(
                "the ring holds one unit at a time at {unit}, whose copy waits for the unit before it; {what}"
            )
        }
        PlanNote::BoundariesResident { granules } => {
            format!("{granules} pages where units meet out of order are resident")
        }
        PlanNote::AddressOrder => {
            "the ring follows the order of addresses: the budget does not allow the order of the step".into()
        }
        PlanNote::LookAheadReduced { asked, possible } => {
            format!("{asked} units of look-ahead were asked for, the ring holds {possible}")
        }
        other => format!("{other:?}"),
    }
}
