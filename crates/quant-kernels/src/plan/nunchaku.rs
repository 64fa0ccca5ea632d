//! The formats of Nunchaku: whole tiles, of which only the wanted rows are written.

use quant_router::formats::{Number, Svdq, SvdqKind};
use quant_router::{PartRole, QuantWeight};

use super::Job;
use super::run::{Kernel, Words, countable};
use super::source::Numbers;
use super::tiles::Grid;
use crate::error::Result;
use crate::family::Family;
use crate::launch::{Launch, THREADS, TargetKind};

/// Rows, and columns of a pair of tiles, that `SVDQuant`'s weights are padded to.
const TILE: u64 = 128;
/// Ranks that are packed together.
const RANKS: u64 = 16;
/// Columns of a group; and those that a block of the `SVDQuant` kernels decodes, of 128 rows.
const GROUP: u64 = 64;
/// Columns that a block of the AWQ kernel decodes.
const AWQ_COLUMNS: u64 = 512;
/// Bytes of numbers that it writes: each thread 16 in each of four rows.
const AWQ_BYTES: u64 = THREADS as u64 * 64;

/// What both kernels read.
struct Tiles {
    data: u64,
    scale: Numbers,
    shift: Numbers,
    smooth: Numbers,
    row_scale: Numbers,
    global: Numbers,
    up: Numbers,
    down: Numbers,
    rank: u64,
    fp4: bool,
    /// Rows of a tile, and tiles beside each other.
    height: u64,
    across: u64,
}

impl Tiles {
    fn launches(&self, job: &Job<'_>, to: Kernel) -> Result<Vec<Launch>> {
        let Some(grid) = Grid::of(job, self.height, self.across)? else { return Ok(Vec::new()) };
        let mut words = Words(vec![self.data, job.out]);
        for numbers in [self.scale, self.shift, self.smooth, self.row_scale, self.global, self.up, self.down]
        {
            words.word(numbers.address);
        }
        words.word(grid.top).pair(grid.rows, grid.columns).pair(grid.first, grid.end);
        words.pair(self.rank, grid.tiles).divider(self.across);
        words.pair(self.scale.kind().into(), self.shift.kind().into());
        words.pair(self.smooth.kind().into(), self.row_scale.kind().into());
        words.pair(self.global.kind().into(), self.up.kind().into());
        words.pair(self.down.kind().into(), self.fp4.into());
        Ok(vec![to.launch(grid.tiles, words)])
    }
}

/// The kernel of a weight of `SVDQuant`: that with matrix instructions, if it can multiply the parts' numbers, and what is wanted is not
/// f32, in which its sums would be seen not to be the decoder's.
pub(super) fn kernel(weight: &QuantWeight, format: Svdq, kind: TargetKind) -> (Family, &'static str) {
    let number = |role| weight.part(role).and_then(|part| Number::of(part.kind));
    let short = |role| matches!(number(role), Some(Number::F16 | Number::Bf16));
    let (scales, name) = match format.kind {
        SvdqKind::Fp4 => (number(PartRole::Scale) == Some(Number::E4m3), "svdq_fp4"),
        _ => (short(PartRole::Scale), "svdq_int4"),
    };
    let alike = number(PartRole::LowRankUp) == number(PartRole::LowRankDown);
    if kind != TargetKind::F32 && scales && alike && short(PartRole::LowRankUp) && short(PartRole::Smooth) {
        return (Family::NunchakuMatrix, name);
    }
    (Family::Nunchaku, "svdq")
}

pub(super) fn plan_svdq(job: &Job<'_>, to: Kernel, format: Svdq) -> Result<Vec<Launch>> {
    let weight = job.weight;
    let elements = weight.elements()?;
    let (rows, columns) = (weight.rows()?, weight.columns());
    let whole = weight.shape.len() == 2
        && elements > 0
        && rows.is_multiple_of(TILE)
        && columns.is_multiple_of(TILE)
        && format.rank.is_multiple_of(RANKS);
    if !whole {
        return Err(job.unsupported("it is no whole number of tiles"));
    }
    countable(job, format.rank, "its rank is too high")?;
    let numbers = |role, count| job.parts.numbers(weight, role, count);
    let optional = |role, count| {
        if weight.part(role).is_some() { numbers(role, count) } else { Ok(Numbers::NONE) }
    };
    let tiles = Tiles {
        data: job.parts.bytes(weight, weight.needs(PartRole::Data)?, elements / 2, 4)?,
        scale: numbers(PartRole::Scale, rows.saturating_mul(columns / format.group()))?,
        shift: Numbers::NONE,
        smooth: numbers(PartRole::Smooth, columns)?,
        row_scale: optional(PartRole::RowScale, rows)?,
        global: optional(PartRole::GlobalScale, 1)?,
        up: numbers(PartRole::LowRankUp, rows.saturating_mul(format.rank))?,
        down: numbers(PartRole::LowRankDown, columns.saturating_mul(format.rank))?,
        rank: format.rank,
        fp4: format.kind == SvdqKind::Fp4,
        height: TILE,
        across: columns / GROUP,
    };
    // Matrix instructions have 16 bytes a thread of these, and four scales of 8 bits.
    let whole = |address: u64| address.is_multiple_of(16);
    let aligned = whole(tiles.data)
        && whole(tiles.up.address)
        && whole(tiles.down.address)
        && tiles.scale.address.is_multiple_of(4);
    let to = match to.family.before() {
        Some((family, name)) if !aligned => Kernel { family, name, ..to },
        _ => to,
    };
    tiles.launches(job, to)
}

pub(super) fn plan_awq(job: &Job<'_>, to: Kernel) -> Result<Vec<Launch>> {
    let weight = job.weight;
    let elements = weight.elements()?;
    let (rows, columns) = (weight.rows()?, weight.columns());
    if weight.shape.len() != 2 || elements == 0 || !rows.is_multiple_of(4) || !columns.is_multiple_of(GROUP) {
        return Err(job.unsupported("it is no whole number of tiles"));
    }
    let grid = |role| job.parts.numbers(weight, role, elements / GROUP);
    let tiles = Tiles {
        data: job.parts.bytes(weight, weight.needs(PartRole::Data)?, elements / 2, 16)?,
        scale: grid(PartRole::Scale)?,
        shift: grid(PartRole::ZeroPoint)?,
        smooth: Numbers::NONE,
        row_scale: Numbers::NONE,
        global: Numbers::NONE,
        up: Numbers::NONE,
        down: Numbers::NONE,
        rank: 0,
        fp4: false,
        height: AWQ_BYTES / job.kind.bytes() / AWQ_COLUMNS,
        across: columns.div_ceil(AWQ_COLUMNS),
    };
    tiles.launches(job, to)
}
