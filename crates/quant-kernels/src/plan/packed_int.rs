//! GPTQ, AWQ and the integers of compressed-tensors: whole tiles, of which only the wanted rows are written.

use std::ops::RangeInclusive;

use quant_router::PartRole;
use quant_router::formats::{PackedInt, Words as Layout};

use super::run::{Kernel, Words, countable};
use super::tiles::Grid;
use super::{Job, unsupported};
use crate::error::Result;
use crate::family::Family;
use crate::launch::Launch;

/// Rows and columns of a tile, where words hold columns, and where they hold eight rows.
const TILE: [u64; 2] = [32, 256];
const TILE_OF_WORDS: [u64; 2] = [128, 128];
/// Tiles that a block decodes where it may fill a table of groups, so that it seldom does; and how many blocks are enough: a few for each
/// place where a large GPU runs them.
const EACH: RangeInclusive<u64> = 2..=8;
const BLOCKS: u64 = 2112;

/// The kernel of a layout and a number of bits.
pub(super) fn kernel(format: PackedInt) -> Option<(Family, &'static str)> {
    Some(match (format.words, format.bits) {
        (Layout::Columns, 2) => (Family::Gptq, "gptq2"),
        (Layout::Columns, 3) => (Family::Gptq, "gptq3"),
        (Layout::Columns, 4) => (Family::Gptq, "gptq4"),
        (Layout::Columns, 8) => (Family::Gptq, "gptq8"),
        (Layout::Rows, 4) => (Family::Awq, "awq_gemm"),
        (Layout::Along, 2) => (Family::Compressed, "compressed2"),
        (Layout::Along, 3) => (Family::Compressed, "compressed3"),
        (Layout::Along, 4) => (Family::Compressed, "compressed4"),
        (Layout::Along, 8) => (Family::Compressed, "compressed8"),
        _ => return None,
    })
}

pub(super) fn plan(job: &Job<'_>, to: Kernel, format: PackedInt) -> Result<Vec<Launch>> {
    let weight = job.weight;
    let &[rows, columns] = weight.shape.as_slice() else {
        return Err(job.unsupported("it is no matrix"));
    };
    // Kernels count the bytes from a group's zero points and scales to the next one's, and groups of a tile's rows.
    countable(job, rows.saturating_mul(4), "it has too many rows")?;
    countable(job, columns.saturating_mul(8), "its rows are too long")?;
    let bits = u64::from(format.bits);
    let whole = |numbers: u64| (numbers * bits).is_multiple_of(32);
    let (row_words, column_words) = ((rows * bits).div_ceil(32), (columns * bits).div_ceil(32));
    let (words, fits, [height, width]) = match format.words {
        Layout::Columns => (column_words * rows, whole(rows) && whole(columns), TILE),
        Layout::Rows => (row_words * columns, whole(rows), TILE_OF_WORDS),
        _ => (rows * column_words, true, TILE),
    };
    if !fits {
        return Err(job.unsupported("its rows or columns are no whole words"));
    }
    let groups = columns.div_ceil(format.group.max(1));
    let part = |role, words: u64| job.parts.bytes(weight, weight.needs(role)?, words * 4, 4);
    let data = part(PartRole::Data, words)?;
    let zero = if format.symmetric { 0 } else { part(PartRole::ZeroPoint, row_words * groups)? };
    let index = if format.indexed { part(PartRole::GroupIndex, columns)? } else { 0 };
    let scale = job.parts.numbers(weight, PartRole::Scale, rows * groups)?;
    if !scale.number.is_float() {
        return Err(unsupported(weight, "its scales are no floats of 16 or 32 bits"));
    }
    let tiles = columns.div_ceil(width);
    let Some(all) = Grid::of(job, height, tiles)? else { return Ok(Vec::new()) };
    let table = format.indexed && format.words != Layout::Rows;
    let each = if table { (all.tiles / BLOCKS).clamp(*EACH.start(), *EACH.end()) } else { 1 };
    let across = tiles.div_ceil(each);
    let grid = Grid { tiles: all.tiles / tiles * across, ..all };
    let mut words = Words(vec![data, job.out, scale.address, zero, index, grid.top]);
    words.pair(rows, columns).pair(grid.first, grid.end).pair(groups, grid.tiles);
    words.pair(row_words, column_words).divider(across).divider(format.group);
    words.pair(scale.kind().into(), format.zero_less_one.into()).pair(each, 0);
    Ok(vec![to.launch(grid.tiles, words)])
}
