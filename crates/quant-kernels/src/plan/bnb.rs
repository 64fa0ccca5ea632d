//! The 4-bit formats of bitsandbytes.

use quant_router::PartRole;
use quant_router::formats::Bnb4;

use super::Job;
use super::run::{Kernel, LONGEST, Run, pieces};
use crate::error::Result;
use crate::launch::Launch;

pub(super) fn plan(job: &Job<'_>, to: Kernel, format: Bnb4) -> Result<Vec<Launch>> {
    let weight = job.weight;
    let elements = weight.elements()?;
    let block = format.block.max(1);
    let count = elements.div_ceil(block);
    let part = |role, need: u64, multiple| job.parts.bytes(weight, weight.needs(role)?, need, multiple);
    let data = part(PartRole::Data, elements.div_ceil(2), 1)?;
    let codebook = part(PartRole::Codebook, 64, 4)?;
    let (scale, indexed, nested, nested_block, offset) = match format.nested {
        None => (part(PartRole::Scale, count.saturating_mul(4), 4)?, 0, 0, 1, 0),
        Some(nested) => {
            let block = nested.block.max(1);
            let scales = part(PartRole::Scale, count, 1)?;
            let table = part(PartRole::ScaleCodebook, 1024, 4)?;
            let of_scales = part(PartRole::GlobalScale, count.div_ceil(block).saturating_mul(4), 4)?;
            (scales, table, of_scales, block, nested.offset_bits)
        }
    };
    let mut launches = Vec::new();
    for (first, end, out) in pieces(job) {
        // Where scales of scales, scales and bytes begin at the same element; the first one of all is such a place.
        let period = block.saturating_mul(nested_block).saturating_mul(2);
        let base = if end < 2 * job.longest { 0 } else { first - first % period };
        if end - base >= 2 * LONGEST {
            return Err(job.unsupported("its blocks are too long"));
        }
        let run = Run {
            data: data + base / 2,
            bytes: (end - base).div_ceil(2),
            first: first - base,
            end: end - base,
            out,
            granule: 2,
        };
        let mut words = run.words(job.kind);
        let scale_bytes = if indexed == 0 { 4 } else { 1 };
        words.word(scale + base / block * scale_bytes).word(codebook).word(indexed);
        words.word(if indexed == 0 { 0 } else { nested + base / block / nested_block * 4 });
        words.divider(block).divider(nested_block).pair(offset.into(), 0);
        launches.push(to.launch(run.tiles(job.kind), words));
    }
    Ok(launches)
}
