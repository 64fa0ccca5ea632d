#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod budget;
mod builder;
mod error;
mod offloader;
mod pace;
mod planned;
mod report;
mod request;
mod step_trace;

pub use budget::Budget;
pub use builder::OffloaderBuilder;
pub use error::{Error, Result};
pub use offloader::Offloader;
pub use pace::Gain;
pub use planned::PlannedOffloader;
pub use report::{HostReport, Report};

pub use gpu_driver::{
    Bytes, DeviceAddress, DeviceInfo, DeviceKind, DeviceOrdinal, Driver, DriverError, MemoryInfo,
    StreamHandle,
};
pub use offload_core::{
    BlockId, EngineError, EngineOptions, EngineReport, EngineStats, Plan, PlanError, PlanNote, StagingStats,
    TensorId, UnitId, UnitPlan,
};
pub use pinned_pool::{
    FileBytes, HostBytes, HostError, HostLevel, KeepAlive, Levels, Placed, SourceBytes, SourceFile,
    StagingOptions, StoreOptions, Watch, Work,
};
pub use startup_timing;
pub use vmm_alloc::{AddressSpace, VmmError};
