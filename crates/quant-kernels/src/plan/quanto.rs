//! The formats of optimum-quanto below a byte. What lies at the same bits of all bytes is a part; bytes are a run, of which some parts are
//! wanted.

use std::ops::Range;

use quant_router::PartRole;
use quant_router::formats::QuantoBits;

use super::Job;
use super::run::{Kernel, LONGEST, Run, countable, pieces};
use crate::error::Result;
use crate::family::Family;
use crate::launch::Launch;

/// The kernel of numbers of so many bits.
pub(super) fn kernel(bits: u32) -> Option<(Family, &'static str)> {
    match bits {
        2 => Some((Family::Quanto, "quanto2")),
        4 => Some((Family::Quanto, "quanto4")),
        _ => None,
    }
}

pub(super) fn plan(job: &Job<'_>, to: Kernel, format: QuantoBits) -> Result<Vec<Launch>> {
    let weight = job.weight;
    let elements = weight.elements()?;
    let group = format.group.max(1);
    if !elements.is_multiple_of(group) {
        return Err(job.unsupported("it is no whole number of groups"));
    }
    let groups = elements / group;
    let rows = groups.div_ceil(u64::from(8 / format.bits));
    let stride = rows.saturating_mul(group);
    let data = job.parts.bytes(weight, weight.needs(PartRole::Data)?, stride, 1)?;
    let scale = job.parts.numbers(weight, PartRole::Scale, groups)?;
    let shift = job.parts.numbers(weight, PartRole::ZeroPoint, groups)?;
    countable(job, group, "its groups are too long")?;
    countable(job, rows, "it has too many groups")?;
    let mut launches = Vec::new();
    for (first, end, out) in pieces(job) {
        for Segment { bytes, parts } in segments(first, end, stride) {
            let base = bytes.start - bytes.start % group;
            let run = Run {
                data: data + base,
                bytes: bytes.end - base,
                first: bytes.start - base,
                end: bytes.end - base,
                out: out + (parts.start * stride + bytes.start - first) * job.kind.bytes(),
                granule: 1,
            };
            let mut words = run.words(job.kind);
            let at = parts.start * rows + base / group;
            words.word(scale.address + at * scale.number.bytes() as u64);
            words.word(shift.address + at * shift.number.bytes() as u64);
            words.word(stride).divider(group).pair(rows, parts.start).pair(parts.end, scale.kind().into());
            words.pair(shift.kind().into(), 0);
            launches.push(to.launch(run.tiles(job.kind), words));
        }
    }
    debug_assert!(group <= LONGEST);
    Ok(launches)
}

/// Bytes of which the same parts are wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Segment {
    bytes: Range<u64>,
    parts: Range<u64>,
}

/// The bytes that hold some elements, each of them once. Element `n` is part `n / stride` of byte `n % stride`.
fn segments(first: u64, end: u64, stride: u64) -> Vec<Segment> {
    let (low, high) = (first / stride, (end - 1) / stride);
    // Where the first part begins, and where the last one ends.
    let (from, to) = (first - low * stride, end - high * stride);
    let mut cuts = if low == high { vec![from, to] } else { vec![0, from, to, stride] };
    cuts.sort_unstable();
    let segment = |cut: &[u64]| {
        let (start, end) = (cut[0], cut[1]);
        let parts = low + u64::from(start < from)..high + u64::from(end <= to);
        Segment { bytes: start..end, parts }
    };
    let wanted = |segment: &Segment| !segment.bytes.is_empty() && !segment.parts.is_empty();
    cuts.windows(2).map(segment).filter(wanted).collect()
}

#[cfg(test)]
mod tests {
    use super::segments;

    #[test]
    fn segments_hold_every_element_once() {
        for stride in 1..7 {
            for first in 0..4 * stride {
                for end in first + 1..=4 * stride {
                    let mut found = Vec::new();
                    for segment in segments(first, end, stride) {
                        assert!(segment.bytes.end <= stride);
                        let parts = segment.parts;
                        found.extend(
                            segment
                                .bytes
                                .flat_map(|byte| parts.clone().map(move |part| part * stride + byte)),
                        );
                    }
                    found.sort_unstable();
                    assert!(found.into_iter().eq(first..end), "{first}..{end} of {stride}");
                }
            }
        }
    }

    #[test]
    fn whole_weights_are_read_once() {
        assert_eq!(segments(0, 20, 10).len(), 1);
        assert_eq!(segments(0, 40, 10).len(), 1);
    }
}
