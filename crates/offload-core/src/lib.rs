#![doc = include_str!("../README.md")]

mod engine;
mod layout;
mod model;
mod plan;
mod schedule;
mod simulate;
mod tenancy;
mod unit_set;
mod units;

pub use engine::{
    Engine, EngineDesc, EngineError, EngineOptions, EngineReport, EngineStats, SharedPages, Source,
    SourcePart, StagingStats, StepTimes, StoreSource, UnitReport,
};
pub use layout::{ALIGNMENT, BlockSpan, Layout, LayoutOptions};
pub use model::{BlockDesc, BlockId, ModelDesc, TensorId, TowerDesc, UnitId};
pub use plan::{Backing, Plan, PlanError, PlanNote, PlanRequest, SegmentedPlan, UnitPlan};
pub use schedule::{Command, Schedule, ScheduleError, UnitView};
pub use simulate::{COPY_LATENCY, Simulation, Stall, Workload, simulate};
pub use tenancy::{Company, Crowded, Switch, Tenancy, Tenant, TenantId};
pub use unit_set::UnitSet;
pub use units::{UnitDesc, Units};
