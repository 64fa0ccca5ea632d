//! Launches worked out from a description, addresses and rows: every size checked, every index inside its part. Pure; a file a family.

mod bnb;
mod ggml;
mod nunchaku;
mod packed_int;
mod quanto;
mod run;
mod scaled;
mod source;
mod tiles;
mod w4a8;

use std::ops::Range;

use quant_router::{Format, QuantError, QuantWeight};

use crate::error::{KernelError, Result};
use crate::family::Family;
use crate::launch::{DevicePart, DeviceTarget, Launch, TargetKind};
use source::Source;

/// What a family needs to plan: the weight, its parts, and the elements that are wanted.
#[derive(Debug, Clone, Copy)]
struct Job<'a> {
    weight: &'a QuantWeight,
    parts: Source<'a>,
    /// The first element and the one behind the last, in the order of the logical shape. There is at least one.
    first: u64,
    end: u64,
    out: u64,
    kind: TargetKind,
    /// Elements of a launch at most.
    longest: u64,
}

impl Job<'_> {
    /// A refusal of this weight.
    fn unsupported(&self, why: &'static str) -> KernelError {
        unsupported(self.weight, why)
    }
}

fn unsupported(weight: &QuantWeight, why: &'static str) -> KernelError {
    KernelError::Unsupported { layer: weight.name.clone(), format: weight.format.to_string(), why }
}

/// The launches that write some rows of a weight into device memory. None if there are no elements.
///
/// # Errors
/// If rows, parts and target do not fit the description, lie where a device cannot read or write their numbers, or there is no
/// kernel for the weight.
pub fn plan(
    weight: &QuantWeight,
    parts: &[DevicePart<'_>],
    rows: Range<u64>,
    target: DeviceTarget,
) -> Result<Vec<Launch>> {
    plan_pieces(weight, parts, rows, target, run::LONGEST)
}

/// As [`plan`], in launches of at most so many elements, of which there are 2^30 at most in any case. Formats that are
/// decoded in tiles are so in one launch.
pub fn plan_pieces(
    weight: &QuantWeight,
    parts: &[DevicePart<'_>],
    rows: Range<u64>,
    target: DeviceTarget,
    longest: u64,
) -> Result<Vec<Launch>> {
    let (all, columns) = (weight.rows()?, weight.columns());
    if rows.start > rows.end || rows.end > all {
        let (start, end) = (rows.start, rows.end);
        return Err(QuantError::Rows { layer: weight.name.clone(), start, end, rows: all }.into());
    }
    // No product overflows: elements were counted, and their bytes are compared where they would.
    weight.elements()?;
    let (first, end) = (rows.start * columns, rows.end * columns);
    let size = target.kind.bytes();
    if !target.size.0.is_multiple_of(size) || target.size.0 / size != end - first {
        let (have, need) = (target.size.0 / size, end - first);
        return Err(QuantError::TargetSize { layer: weight.name.clone(), have, need }.into());
    }
    if !target.address.0.is_multiple_of(size) {
        let (layer, what) = (weight.name.clone(), "the target".to_owned());
        return Err(KernelError::Misaligned { layer, what, address: target.address, need: size });
    }
    let (out, kind, longest) = (target.address.0, target.kind, longest.clamp(1, run::LONGEST));
    let job = Job { weight, parts: Source::Given(parts), first, end, out, kind, longest };
    launches(&job)
}

/// Whether a weight of this description can be planned for, wherever its parts are.
pub(crate) fn is_supported(weight: &QuantWeight) -> bool {
    let Ok(end) = weight.elements() else { return false };
    let kind = TargetKind::F32;
    let longest = run::LONGEST;
    launches(&Job { weight, parts: Source::Anywhere, first: 0, end, out: 0, kind, longest }).is_ok()
}

/// The kernel of a weight, but for the target's type.
pub(crate) fn kernel_of(weight: &QuantWeight, kind: TargetKind) -> Result<(Family, &'static str)> {
    match weight.format {
        Format::Ggml(kind) => {
            ggml::kernel(kind).ok_or_else(|| unsupported(weight, "its type holds no blocks"))
        }
        Format::Scaled(format) => scaled::kernel(weight, format)
            .ok_or_else(|| unsupported(weight, "its numbers are of an unknown type")),
        Format::Bnb4(_) => Ok((Family::Bnb, "bnb4")),
        Format::QuantoBits(format) => {
            quanto::kernel(format.bits).ok_or_else(|| unsupported(weight, "numbers have 2 or 4 bits"))
        }
        Format::W4A8(_) => Ok((Family::W4A8, "w4a8")),
        Format::PackedInt(format) => {
            packed_int::kernel(format).ok_or_else(|| unsupported(weight, "its words hold other numbers"))
        }
        Format::Svdq(format) => Ok(nunchaku::kernel(weight, format, kind)),
        Format::NunchakuAwq => Ok((Family::Nunchaku, "awq")),
        _ => Err(unsupported(weight, "its format is unknown here")),
    }
}

fn launches(job: &Job<'_>) -> Result<Vec<Launch>> {
    let (family, kernel) = kernel_of(job.weight, job.kind)?;
    let to = run::Kernel { family, name: kernel, kind: job.kind };
    match job.weight.format {
        Format::Ggml(kind) => ggml::plan(job, to, kind),
        Format::Scaled(format) => scaled::plan(job, to, format),
        Format::Bnb4(format) => bnb::plan(job, to, format),
        Format::QuantoBits(format) => quanto::plan(job, to, format),
        Format::W4A8(format) => w4a8::plan(job, to, format),
        Format::PackedInt(format) => packed_int::plan(job, to, format),
        Format::Svdq(format) => nunchaku::plan_svdq(job, to, format),
        Format::NunchakuAwq => nunchaku::plan_awq(job, to),
        _ => Err(job.unsupported("its format is unknown here")),
    }
}
