//! Device memory with nothing behind its ends, and the comparison of what kernels write there with what decoders write.
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block, reason = "tests drive the unsafe verbs")]

use std::ops::Range;
use std::sync::Arc;

use gpu_driver::{Access, Bytes, DeviceAddress, Driver, HostToDevice, PageHandle, StreamHandle};
use half::{bf16, f16};
use quant_kernels::{DevicePart, DeviceTarget, Family, Kernels, Launch, TargetKind, plan_pieces};
use quant_router::{Target, dequantize};

use super::{Case, words};

/// Which end of its pages memory lies at: beyond it nothing is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Start,
    Back,
}

/// Device memory of a size, between pages that are not there.
pub(crate) struct Memory {
    driver: Arc<dyn Driver>,
    reserved: DeviceAddress,
    pages: PageHandle,
    mapped: Bytes,
    pub(crate) address: DeviceAddress,
    pub(crate) size: usize,
}

impl Memory {
    /// Memory that begins `skew` bytes from the start, or ends as much before the back.
    pub(crate) fn new(driver: &Arc<dyn Driver>, size: usize, end: End, skew: u64) -> Self {
        let granule = driver.device_info().granularity;
        let mapped = Bytes((size as u64 + skew).max(1).next_multiple_of(granule.0));
        let reserved = driver.reserve_address(Bytes(mapped.0 + 2 * granule.0), Bytes::ZERO).unwrap();
        let start = reserved.offset(granule);
        let pages = driver.create_pages(mapped).unwrap();
        // SAFETY: the reservation is fresh, the pages are alive.
        unsafe {
            driver.map_pages(start, mapped, pages).unwrap();
            driver.set_access(start, mapped, Access::ReadWrite).unwrap();
        }
        let offset = if end == End::Start { skew } else { mapped.0 - size as u64 - skew };
        let address = start.offset(Bytes(offset));
        Self { driver: Arc::clone(driver), reserved, pages, mapped, address, size }
    }

    pub(crate) fn write(&self, bytes: &[u8], stream: StreamHandle) {
        let copy =
            HostToDevice { target: self.address, source: bytes.as_ptr(), size: Bytes(bytes.len() as u64) };
        // SAFETY: mapped and as long; waited for.
        unsafe { self.driver.copy_to_device(&[copy], stream) }.unwrap();
        self.driver.synchronize_stream(stream).unwrap();
    }

    pub(crate) fn poison(&self, stream: StreamHandle) {
        let start = self.reserved.offset(self.driver.device_info().granularity);
        // SAFETY: all of it is mapped.
        unsafe { self.driver.fill(start, self.mapped, POISON, stream) }.unwrap();
        self.driver.synchronize_stream(stream).unwrap();
    }

    /// Everything that is mapped, and where the memory begins in it.
    pub(crate) fn read(&self, stream: StreamHandle) -> (Vec<u8>, usize) {
        let start = self.reserved.offset(self.driver.device_info().granularity);
        let mut bytes = vec![0; self.mapped.as_usize()];
        // SAFETY: mapped and as long; waited for.
        unsafe { self.driver.copy_to_host(bytes.as_mut_ptr(), start, self.mapped, stream) }.unwrap();
        self.driver.synchronize_stream(stream).unwrap();
        (bytes, (self.address.0 - start.0) as usize)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let granule = self.driver.device_info().granularity;
        let start = self.reserved.offset(granule);
        // SAFETY: every use was waited for.
        unsafe {
            self.driver.unmap_pages(start, self.mapped).unwrap();
            self.driver.release_pages(self.pages).unwrap();
            self.driver.free_address(self.reserved, Bytes(self.mapped.0 + 2 * granule.0)).unwrap();
        }
    }
}

const POISON: u8 = 0xa5;
/// Elements of a launch where launches are short: no multiple of a vector.
const PIECE: u64 = 4099;

/// What decoders make of rows, as bytes; all that are no numbers are the same one.
fn wanted(case: &Case, rows: Range<u64>, kind: TargetKind) -> Vec<u8> {
    let count = ((rows.end - rows.start) * case.weight.columns()) as usize;
    // Decoders refuse an index of groups that there are not; kernels, which cannot, make numbers of it that are none.
    let (parts, lost) = words::in_known_groups(case);
    let run = |target| dequantize(&case.weight, &parts, rows.clone(), target).unwrap();
    let columns = case.weight.columns() as usize;
    let lost = |at: &usize| lost.contains(&(at % columns));
    match kind {
        TargetKind::F32 => {
            let mut numbers = vec![0.0_f32; count];
            run(Target::F32(&mut numbers));
            (0..count).filter(lost).for_each(|at| numbers[at] = f32::NAN);
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        TargetKind::Bf16 => {
            let mut numbers = vec![bf16::ZERO; count];
            run(Target::Bf16(&mut numbers));
            (0..count).filter(lost).for_each(|at| numbers[at] = bf16::NAN);
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
        TargetKind::F16 => {
            let mut numbers = vec![f16::ZERO; count];
            run(Target::F16(&mut numbers));
            (0..count).filter(lost).for_each(|at| numbers[at] = f16::NAN);
            numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
        }
    }
}

fn number(bytes: &[u8], kind: TargetKind) -> f32 {
    match kind {
        TargetKind::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        TargetKind::Bf16 => bf16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
        TargetKind::F16 => f16::from_le_bytes(bytes.try_into().unwrap()).to_f32(),
    }
}

/// Whether bytes are the same numbers, or no farther apart than one step and `slack`; all that are no numbers are alike.
fn same(have: &[u8], want: &[u8], kind: TargetKind, slack: Option<f32>) -> bool {
    let (near, far) = (number(have, kind), number(want, kind));
    let steps = match kind {
        TargetKind::F32 => 23,
        TargetKind::Bf16 => 7,
        TargetKind::F16 => 10,
    };
    let step = far.abs().log2().floor().exp2() / (1 << steps) as f32;
    have == want
        || near.is_nan() && far.is_nan()
        || slack.is_some_and(|slack| (near - far).abs() <= step + slack)
}

/// How far numbers may be off that matrix instructions summed, besides one step: their sums are exact to some 22 bits of the largest
/// term. None where they must be the decoder's.
fn slack(launches: &[Launch], refused: bool, want: &[u8], kind: TargetKind) -> Option<f32> {
    let summed = launches.iter().any(|launch| launch.family == Family::NunchakuMatrix);
    let numbers = want.chunks(kind.bytes() as usize).map(|bytes| number(bytes, kind).abs());
    (summed && !refused).then(|| numbers.fold(0.0, f32::max) / (1 << 20) as f32)
}

/// Runs the kernels of a case on some rows, whole and in pieces, and gives what differs.
pub(crate) fn differences(kernels: &Kernels, case: &Case, end: End, stream: StreamHandle) -> Vec<String> {
    differences_of(kernels, case, end, stream, false)
}

/// As before; `refused` if the device takes no matrix instructions.
pub(crate) fn differences_of(
    kernels: &Kernels,
    case: &Case,
    end: End,
    stream: StreamHandle,
    refused: bool,
) -> Vec<String> {
    let driver = kernels.driver();
    let rows = case.weight.rows().unwrap();
    let memories: Vec<_> = case
        .parts
        .iter()
        .map(|(tensor, bytes)| {
            let memory = Memory::new(driver, bytes.len(), end, 0);
            if !bytes.is_empty() {
                memory.write(bytes, stream);
            }
            (tensor, memory)
        })
        .collect();
    let parts: Vec<_> = memories
        .iter()
        .map(|(tensor, memory)| DevicePart {
            tensor: tensor.as_str(),
            address: memory.address,
            size: Bytes(memory.size as u64),
        })
        .collect();
    let mut found = Vec::new();
    let one = rows / 2..(rows / 2 + 1).min(rows);
    // Rows, how many numbers the target is off, and whether launches are short ones.
    let ranges = [
        (0..rows, 0, false),
        (rows / 3..rows, 0, false),
        (one, 1, false),
        (rows..rows, 0, false),
        (0..rows, 0, true),
    ];
    for kind in TargetKind::ALL {
        for (range, skew, pieces) in ranges.clone() {
            let want = wanted(case, range.clone(), kind);
            let memory = Memory::new(driver, want.len(), end, skew * kind.bytes());
            memory.poison(stream);
            let target = DeviceTarget { address: memory.address, size: Bytes(want.len() as u64), kind };
            let launches = plan_pieces(&case.weight, &parts, range.clone(), target, PIECE).unwrap();
            let slack = slack(&launches, refused, &want, kind);
            if pieces {
                // SAFETY: all memory is there until the stream was waited for.
                unsafe { kernels.submit(&launches, stream) }.unwrap();
            } else {
                // SAFETY: as above.
                unsafe { kernels.dequantize(&case.weight, &parts, range.clone(), target, stream) }.unwrap();
            }
            driver.synchronize_stream(stream).unwrap();
            let (have, begin) = memory.read(stream);
            let within = begin..begin + want.len();
            let size = kind.bytes() as usize;
            let differ = |at: &usize| {
                !same(
                    &have[begin + at * size..begin + (at + 1) * size],
                    &want[at * size..(at + 1) * size],
                    kind,
                    slack,
                )
            };
            let wrong: Vec<_> = (0..want.len() / size).filter(differ).collect();
            let beside =
                have.iter().enumerate().filter(|(at, byte)| !within.contains(at) && **byte != POISON).count();
            if !wrong.is_empty() || beside > 0 {
                let first = wrong.first().copied().unwrap_or_default();
                let numbers = |bytes: &[u8]| format!("{:02x?}", &bytes[..size.min(bytes.len())]);
                found.push(format!(
                    "{} {range:?} as {} at the {end:?}: {} of {} numbers differ, the first is {first} ({} for {}), and {beside} \
                     bytes beside them",
                    case.name,
                    kind.name(),
                    wrong.len(),
                    want.len() / size,
                    numbers(&have[(begin + first * size).min(have.len())..]),
                    numbers(&want[(first * size).min(want.len())..]),
                ));
            }
        }
    }
    found
}
