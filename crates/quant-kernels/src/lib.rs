#![doc = include_str!("../README.md")]

mod error;
mod family;
mod kernels;
mod launch;
mod plan;

pub use error::{KernelError, Result};
pub use family::Family;
pub use kernels::Kernels;
pub use launch::{DevicePart, DeviceTarget, Launch, THREADS, TargetKind};
pub use plan::{plan, plan_pieces};
