#![doc = include_str!("../README.md")]
#![expect(unsafe_code, reason = "this crate owns host memory that devices read")]

mod claims;
mod error;
mod event;
mod file;
mod file_system;
mod limits;
mod mapped;
mod maps;
mod pending_read;
mod prepared;
mod ranges;
mod registered;
mod release;
mod reserve;
mod slab;
mod source;
mod staging;
mod store;
mod system;
mod transfer;
mod watch;

pub use claims::registered_bytes;
pub use error::{HostError, Result};
pub use event::Event;
pub use file::{FileBytes, SourceFile};
pub use limits::{memory_limit, memory_room, total_memory};
pub use maps::{HostMaps, MemoryKind};
pub use pending_read::PendingRead;
pub use prepared::PreparedCopy;
pub use registered::{KeepAlive, Registered};
pub use reserve::{
    BlockUse, ModelReserve, Pinning, RESERVED_SHARE_VARIABLE, ReserveBlock, ReserveLimits, ReserveModel,
    ReservePlan, reserved_share,
};
pub use source::{HostBytes, HostRun, LineRun, SourceBytes, SourceTensor};
pub use staging::{StagedCopy, StagedJob, StagedStep, StagingLine, StagingOptions, StagingReport, Ticket};
pub use store::{
    HostLevel, HostStore, HostStoreBuilder, Levels, Placed, StepDown, StoreOptions, StoreReport,
};
pub use transfer::TransferStream;
pub use watch::{Watch, Work};
