#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod allocations;
mod budget;
mod builder;
mod cutting;
mod error;
mod offloader;
mod pace;
mod planned;
mod preload;
mod rebudget;
mod report;
mod request;
mod share;
mod step_trace;

pub use allocations::Allocations;
pub use budget::Budget;
pub use builder::OffloaderBuilder;
pub use error::{Error, Result};
pub use offloader::Offloader;
pub use pace::Gain;
pub use planned::{PlannedOffloader, Raised};
pub use preload::{Decision, Preload, Room};
pub use report::{HostReport, Report};
pub use share::{Share, ShareReport};

pub use gpu_driver::{
    Bytes, DeviceAddress, DeviceInfo, DeviceKind, DeviceOrdinal, Driver, DriverError, MemoryInfo,
    StreamHandle,
};
pub use offload_core::{
    Backing, BlockId, Company, EngineError, EngineOptions, EngineReport, EngineStats, Plan, PlanError,
    PlanNote, StagingStats, TensorId, UnitId, UnitPlan,
};
pub use pinned_pool::{
    BlockUse, FileBytes, HostBytes, HostError, HostLevel, KeepAlive, Levels, Pinning, Placed, ReserveBlock,
    ReserveLimits, ReserveModel, ReservePlan, SourceBytes, SourceFile, StagingOptions, StoreOptions, Watch,
    Work, memory_limit, memory_room, registered_bytes, reserved_share,
};
pub use startup_timing;
pub use vmm_alloc::{AddressSpace, Page, PagePool, VmmError};
