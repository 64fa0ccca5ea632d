//! The formats of optimum-quanto below a byte. The numbers that lie at the same bits of their bytes are a run.

use quant_router::PartRole;
use quant_router::formats::QuantoBits;

use super::Job;
use super::run::{Kernel, LONGEST, Run, countable, pieces};
use crate::error::Result;
use crate::launch::Launch;

pub(super) fn plan(job: &Job<'_>, to: Kernel, format: QuantoBits) -> Result<Vec<Launch>> {
    let weight = job.weight;
    let elements = weight.elements()?;
    let group = format.group.max(1);
    if !matches!(format.bits, 2 | 4) {
        return Err(job.unsupported("numbers have 2 or 4 bits"));
    }
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
    let mut launches = Vec::new();
    for (mut first, end, mut out) in pieces(job) {
        while first < end {
            let part = first / stride;
            let until = end.min((part + 1) * stride);
            let base = first - first % group;
            let begin = base - part * stride;
            let run = Run {
                data: data + begin,
                bytes: until - base,
                first: first - base,
                end: until - base,
                out,
                granule: 1,
            };
            let mut words = run.words(job.kind);
            let at = base / group;
            words.word(scale.address + at * scale.number.bytes() as u64);
            words.word(shift.address + at * shift.number.bytes() as u64);
            words.divider(group).pair(u64::from(format.bits) * part, (1 << format.bits) - 1);
            words.pair(scale.kind().into(), shift.kind().into());
            launches.push(to.launch(run.tiles(job.kind), words));
            out += (until - first) * job.kind.bytes();
            first = until;
        }
    }
    debug_assert!(group <= LONGEST);
    Ok(launches)
}
