//! W4A8.

use quant_router::PartRole;
use quant_router::formats::W4A8;

use super::Job;
use super::run::{Kernel, Run, countable, pieces};
use super::source::Numbers;
use crate::error::Result;
use crate::launch::Launch;

pub(super) fn plan(job: &Job<'_>, to: Kernel, format: W4A8) -> Result<Vec<Launch>> {
    let weight = job.weight;
    let elements = weight.elements()?;
    let (rows, columns) = (weight.rows()?, weight.columns());
    let group = format.group.max(1);
    if !columns.is_multiple_of(group) || !columns.is_multiple_of(2) {
        return Err(job.unsupported("its rows are no whole groups and bytes"));
    }
    let data = job.parts.bytes(weight, weight.needs(PartRole::Data)?, elements / 2, 1)?;
    let row_groups = columns / group;
    let count = rows.saturating_mul(row_groups);
    let numbers = |role, count| job.parts.numbers(weight, role, count);
    let optional = |wanted, role, count| if wanted { numbers(role, count) } else { Ok(Numbers::NONE) };
    let groups = numbers(PartRole::GroupScale, count)?;
    let scales = numbers(PartRole::Scale, rows)?;
    let codebook = optional(format.codebook, PartRole::Codebook, 16)?;
    let correction = optional(format.correction, PartRole::Correction, count)?;
    if job.first == job.end {
        return Ok(Vec::new());
    }
    countable(job, columns, "its rows are too long")?;
    countable(job, rows, "it has too many rows")?;
    let launch = |(first, end, out): (u64, u64, u64)| {
        let row = first / columns;
        let base = row * columns;
        let run = Run {
            data: data + base / 2,
            bytes: (end - base).div_ceil(2),
            first: first - base,
            end: end - base,
            out,
            granule: 2,
        };
        let mut words = run.words(job.kind);
        words.word(groups.address).word(scales.address).word(codebook.address).word(correction.address);
        words.word(rows).divider(columns).divider(group).pair(row, row_groups);
        words.pair(groups.kind().into(), scales.kind().into());
        words.pair(codebook.kind().into(), correction.kind().into());
        to.launch(run.tiles(job.kind), words)
    };
    Ok(pieces(job).map(launch).collect())
}
