//! What goes to a device: where parts and numbers lie, and launches worked out from them. Plain data.

use gpu_driver::{Bytes, DeviceAddress};

use crate::family::Family;

/// Threads of a block, in every kernel.
pub const THREADS: u32 = 256;

/// A part of a weight in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DevicePart<'a> {
    /// The tensor's name, as the weight's description has it.
    pub tensor: &'a str,
    /// Where its bytes begin.
    pub address: DeviceAddress,
    /// How many there are.
    pub size: Bytes,
}

/// The type of numbers that are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TargetKind {
    /// Single precision: what decoders compute.
    F32,
    /// Rounded to the nearest bf16, ties to even.
    Bf16,
    /// Rounded to the nearest f16, ties to even; beyond its range, infinity.
    F16,
}

impl TargetKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::F32, Self::Bf16, Self::F16];

    /// Bytes of a number.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// How the names of kernels end that write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }
}

/// Device memory for numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceTarget {
    /// Where the first number goes.
    pub address: DeviceAddress,
    /// How many bytes there are: as many as the rows have.
    pub size: Bytes,
    /// What numbers are stored as.
    pub kind: TargetKind,
}

/// One launch of a kernel, all addresses and bounds in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// The module.
    pub family: Family,
    /// The kernel's name, but for the target's type.
    pub kernel: &'static str,
    /// What it writes.
    pub kind: TargetKind,
    /// Blocks of [`THREADS`] threads.
    pub blocks: u32,
    /// The kernel's only argument, a struct.
    pub argument: Vec<u64>,
}
