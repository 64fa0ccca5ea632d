//! The numbers and handles that cross the driver seam, each a type of its own.
//!
//! Sizes, addresses and counts never mix: a `Bytes` is not a `DeviceAddress`. Handles are plain values; who owns
//! what they name, and when it is given back, is decided by the crates above (vmm-alloc, pinned-pool).

use std::fmt;

// Every size and address here is 64 bits wide; the casts in the crates above rely on it.
const _: () = assert!(usize::BITS == 64, "weightstream supports 64-bit targets only");

/// A number of bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// `count` KiB.
    pub const fn kib(count: u64) -> Self {
        Self(count << 10)
    }

    /// `count` MiB.
    pub const fn mib(count: u64) -> Self {
        Self(count << 20)
    }

    /// The number as the language counts memory.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }

    /// The smallest multiple of `unit` that holds this many bytes; `None` if it does not fit in 64 bits or
    /// `unit` is zero.
    pub const fn checked_round_up(self, unit: Self) -> Option<Self> {
        match self.0.checked_next_multiple_of(unit.0) {
            Some(rounded) => Some(Self(rounded)),
            None => None,
        }
    }
}

/// Bytes in binary units with two decimals, the exact number behind: `64.00 MiB (67108864 bytes)`.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        for (name, unit) in UNITS {
            if self.0 >= unit {
                return write!(f, "{:.2} {name} ({} bytes)", self.0 as f64 / unit as f64, self.0);
            }
        }
        write!(f, "{} bytes", self.0)
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.0)
    }
}

impl std::ops::Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

/// Never below zero: a difference of sizes that would be negative is zero.
impl std::ops::Sub for Bytes {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl std::iter::Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, |total, next| total + next)
    }
}

/// Which GPU, as the driver numbers them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceOrdinal(pub u32);

/// An address in the device's address space (on the host emulator: of this process).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct DeviceAddress(pub u64);

impl DeviceAddress {
    /// The address `offset` further on.
    #[must_use]
    pub const fn offset(self, offset: Bytes) -> Self {
        Self(self.0.wrapping_add(offset.0))
    }
}

impl fmt::Debug for DeviceAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceAddress({:#x})", self.0)
    }
}

/// Physical memory made by [`Driver::create_pages`](crate::Driver::create_pages), mapped whole or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageHandle(pub u64);

/// A stream: an ordered queue of device work. On CUDA the value is the `CUstream`, so that a foreign stream
/// (PyTorch's current one) is passed by value; zero is the legacy default stream. On the host emulator zero is the
/// compute stream, which is the calling thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct StreamHandle(pub u64);

impl StreamHandle {
    /// CUDA's legacy default stream; on the host emulator the calling thread.
    pub const DEFAULT: Self = Self(0);
}

/// A point in a stream that other streams, or the host, can wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EventHandle(pub u64);

/// A loaded module of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ModuleHandle(pub u64);

/// A kernel of a loaded module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct KernelHandle(pub u64);

/// What may be done at a mapped address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Nothing: any use is a fault. The guard mode's state of a unit that is not present.
    None,
    /// Read and write.
    ReadWrite,
}

/// What kind of machine stands behind a driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DeviceKind {
    /// An NVIDIA GPU through libcuda.
    Cuda,
    /// The emulator: memory of this process.
    Host,
}

/// Whose streams, events and registrations a driver's are: drivers with the same one may use each other's, and share what is made
/// once for a device. Of this process and while one of them lives; what the number is says nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DeviceIdentity {
    /// CUDA or the emulator.
    pub kind: DeviceKind,
    /// The primary context on CUDA, a count on the emulator.
    pub number: u64,
}

/// What a device is and what it can do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceInfo {
    /// CUDA or the emulator.
    pub kind: DeviceKind,
    /// Which device of this process it is, whichever driver opened it.
    pub identity: DeviceIdentity,
    /// Which one.
    pub ordinal: DeviceOrdinal,
    /// Its name as the driver gives it.
    pub name: String,
    /// All of its memory.
    pub total_memory: Bytes,
    /// The smallest piece physical memory comes in, and the alignment of every mapping.
    pub granularity: Bytes,
    /// The driver's version as it numbers itself (13000 is 13.0); zero on the emulator.
    pub driver_version: u32,
    /// The branch of the NVIDIA kernel driver, such as 580, if there is one and it says so. What pins host memory is this,
    /// while [`driver_version`](Self::driver_version) is the library's, which may be newer.
    pub kernel_driver: Option<u32>,
    /// Whether host memory can be registered read-only (needed to register a read-only mapping).
    pub read_only_registration: bool,
    /// Whether copies can be submitted as one batch.
    pub batch_copies: bool,
}

/// A moment's view of the device's memory, other processes included.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Not in use by anyone.
    pub free: Bytes,
    /// All there is.
    pub total: Bytes,
}

/// How host memory is page-locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Registration {
    /// The device may read and write it.
    ReadWrite,
    /// The device only reads it; required for memory mapped without write permission.
    ReadOnly,
}

/// One host-to-device copy of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostToDevice {
    /// Where the bytes go.
    pub target: DeviceAddress,
    /// Where they come from.
    pub source: *const u8,
    /// How many.
    pub size: Bytes,
}

// SAFETY: a description of a copy; the pointer is never followed through this type. Whoever passes it to
// `Driver::copy_to_device` vouches for the memory behind it there.
unsafe impl Send for HostToDevice {}
// SAFETY: as for `Send`; there is no interior mutability.
unsafe impl Sync for HostToDevice {}
