//! Packed numbers times scales that lie beside them.

use quant_router::formats::{Codes, Family as Name, Global, Number, Order, Scaled, Scales};
use quant_router::{PartRole, QuantWeight};

use super::Job;
use super::run::{Kernel, LONGEST, Run, countable, pieces};
use super::source::Numbers;
use crate::error::Result;
use crate::family::Family;
use crate::launch::Launch;

/// The kernel of packed numbers.
pub(super) fn kernel(weight: &QuantWeight, scaled: Scaled) -> Option<(Family, &'static str)> {
    let regular = is_regular_nvfp4(weight, scaled);
    let name = match scaled.codes {
        Codes::E4m3 => "scaled_e4m3",
        Codes::E5m2 => "scaled_e5m2",
        Codes::Int8 => "scaled_int8",
        Codes::E2m1High if regular => "nvfp4_high",
        Codes::E2m1Low if regular => "nvfp4_low",
        Codes::E2m1High | Codes::E2m1Low => NIBBLES,
        _ => return None,
    };
    Some((Family::Scaled, name))
}

/// The kernel of numbers of 4 bits with scales anywhere.
const NIBBLES: &str = "scaled_e2m1";

/// Whether rows are whole multiples of four times 16 numbers, which share a scale of E4M3.
fn is_regular_nvfp4(weight: &QuantWeight, scaled: Scaled) -> bool {
    let by_16 =
        matches!(scaled.scales, Scales::Blocks { rows: 1, columns: 16, order } if order != Order::Columns);
    let scale = weight.part(PartRole::Scale).and_then(|part| Number::of(part.kind));
    let columns = matrix(weight, scaled.scales).map_or(0, |[_, columns]| columns);
    by_16 && scale == Some(Number::E4m3) && !scaled.zero_point && columns.is_multiple_of(64)
}

/// The matrix that scales are laid over: the first dimension, and all others; for blocks all but the last.
fn matrix(weight: &QuantWeight, scales: Scales) -> Result<[u64; 2]> {
    let elements = weight.elements()?;
    if let (Scales::Blocks { .. }, [_, _, .., columns]) = (scales, &weight.shape[..]) {
        return Ok([elements.checked_div(*columns).unwrap_or(0), *columns]);
    }
    let rows = match &weight.shape[..] {
        [rows, _, ..] => *rows,
        _ => 1,
    };
    Ok([rows, elements.checked_div(rows).unwrap_or(0)])
}

/// How kernels name what else is multiplied, and the parts of it.
fn global(job: &Job<'_>, scaled: Scaled) -> Result<(u64, Numbers, Numbers)> {
    let one = |role| job.parts.numbers(job.weight, role, 1);
    Ok(match scaled.global {
        Global::None => (0, Numbers::NONE, Numbers::NONE),
        Global::Factor => (1, one(PartRole::GlobalScale)?, Numbers::NONE),
        Global::TimesInput => (2, one(PartRole::GlobalScale)?, one(PartRole::InputScale)?),
        Global::InverseOfInput => (3, one(PartRole::GlobalScale)?, one(PartRole::InputScale)?),
        Global::Per127 => (4, Numbers::NONE, Numbers::NONE),
        Global::Divisor => (5, one(PartRole::GlobalScale)?, Numbers::NONE),
        _ => return Err(job.unsupported("what else is multiplied is unknown here")),
    })
}

pub(super) fn plan(job: &Job<'_>, to: Kernel, scaled: Scaled) -> Result<Vec<Launch>> {
    let weight = job.weight;
    let [rows, columns] = matrix(weight, scaled.scales)?;
    let per_byte = scaled.codes.per_byte();
    if columns % per_byte != 0 {
        return Err(job.unsupported("its rows are no whole bytes"));
    }
    let data = job.parts.bytes(weight, weight.needs(PartRole::Data)?, weight.elements()? / per_byte, 1)?;
    let whole = u64::MAX;
    let ([height, width], order) = match scaled.scales {
        Scales::None | Scales::Tensor => ([whole, whole], Order::Rows),
        Scales::Row => ([1, whole], Order::Rows),
        Scales::Blocks { rows, columns, order } => ([rows.max(1), columns.max(1)], order),
        _ => return Err(job.unsupported("what shares a scale is unknown here")),
    };
    let count = match scaled.scales {
        Scales::Blocks { .. } => [rows.div_ceil(height), columns.div_ceil(width)],
        Scales::Row => [rows, 1],
        _ => [1, 1],
    };
    let (stored, order) = match order {
        Order::Rows => (count, 0),
        Order::Columns => (count, 1),
        Order::Swizzled => ([count[0].next_multiple_of(128), count[1].next_multiple_of(4)], 2),
        _ => return Err(job.unsupported("the order of its scales is unknown here")),
    };
    let need = stored[0].checked_mul(stored[1]).ok_or_else(|| job.unsupported("it has too many scales"))?;
    // Files name the type of these scales or leave it a byte: a power of two either way.
    let meant = |number| {
        if number == Number::U8 && scaled.family == Name::MxFp8 { Number::E8m0 } else { number }
    };
    let grid = |role| job.parts.numbers_as(weight, role, need, meant);
    let scale = if scaled.scales == Scales::None { Numbers::NONE } else { grid(PartRole::Scale)? };
    let zero_point = if scaled.zero_point { grid(PartRole::ZeroPoint)? } else { Numbers::NONE };
    let (mode, global, input) = global(job, scaled)?;
    if job.first == job.end {
        return Ok(Vec::new());
    }
    countable(job, columns, "its rows are too long")?;
    countable(job, rows, "it has too many rows")?;
    // A row of whole strips goes on with the next row's first one.
    let strip = width.min(columns);
    let strip = if columns.is_multiple_of(strip) { strip } else { u64::MAX };
    let bytes = matches!(scale.number, Number::E4m3 | Number::E8m0) && scale.address.is_multiple_of(4);
    let fours =
        bytes && !scaled.zero_point && height == 1 && order != 1 && strip <= columns / 4 && count[1] % 4 == 0;
    let nibbles = matches!(scaled.codes, Codes::E2m1High | Codes::E2m1Low);
    let to = if nibbles && !fours { Kernel { name: NIBBLES, ..to } } else { to };
    let launch = |(first, end, out): (u64, u64, u64)| {
        let row = first / columns;
        let base = row * columns;
        let run = Run {
            data: data + base / per_byte,
            bytes: (end - base).div_ceil(per_byte),
            first: first - base,
            end: end - base,
            out,
            granule: per_byte,
        };
        let mut words = run.words(job.kind);
        words.word(scale.address).word(zero_point.address).word(global.address).word(input.address);
        words.divider(columns).divider(height).divider(width).divider(strip);
        words.pair(row, count[0]).pair(count[1], order);
        words.pair(scale.kind().into(), zero_point.kind().into());
        words.pair(global.kind().into(), input.kind().into());
        words.pair(mode, u64::from(scaled.codes == Codes::E2m1High)).pair(fours.into(), 0);
        to.launch(run.tiles(job.kind), words)
    };
    // A piece begins in a row, whose start is counted too.
    debug_assert!(columns <= LONGEST);
    Ok(pieces(job).map(launch).collect())
}
