#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod analysis;
mod clock;
mod compare;
mod error;
mod event;
mod export;
mod merge;
mod phase;
mod process;
mod read;
mod record;
mod recorder;
mod report;
mod trace;
mod write;

pub use analysis::Analysis;
pub use clock::Clock;
pub use compare::{Comparison, Difference, Distribution, RunSet, diff, stats};
pub use error::{Result, TimingError};
pub use event::Event;
pub use export::{Column, Table, chrome_trace, folded_stacks, table};
pub use merge::{Part, merge};
pub use phase::{Amounts, Levels, Phase, PhaseId, Status};
pub use process::Sample;
pub use read::{MAX_FILE_BYTES, read, read_bytes};
pub use record::{MAX_DEPTH, MAX_NAME_BYTES, MAX_PHASES, Record};
pub use recorder::{Ending, Recorder, RecorderOptions, Span};
pub use report::{PartState, ProcessFacts, Report, SCHEMA, SCHEMA_VERSION};
pub use trace::TraceBuilder;
pub use write::to_json;
