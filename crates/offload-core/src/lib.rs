//! What streams when: plan, schedule, simulate, and the engine that executes it.

mod engine;
mod layout;
mod model;
mod plan;
mod schedule;
mod units;

pub use engine::{
    Engine, EngineDesc, EngineError, EngineOptions, EngineReport, EngineStats, Source, SourcePart,
    StoreSource, UnitReport,
};
pub use layout::{ALIGNMENT, BlockSpan, Layout, LayoutOptions};
pub use model::{BlockDesc, BlockId, ModelDesc, TensorId, TowerDesc, UnitId};
pub use plan::{Backing, Plan, PlanError, PlanNote, PlanRequest, UnitPlan};
pub use schedule::{Command, Schedule, ScheduleError, UnitView};
pub use units::{UnitDesc, Units};
