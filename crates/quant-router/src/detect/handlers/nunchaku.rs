//! Nunchaku: `SVDQuant` in INT4 and FP4, and AWQ.

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, elements, inside, is, module};
use super::{checked, draft, packed_as, tensor, two};
use crate::error::{QuantError, Result};
use crate::formats::nunchaku::{AWQ_GROUP, RANKS, TILE};
use crate::formats::{Svdq, SvdqKind};
use crate::weight::{Format, PartRole};

/// The types of what is not packed to 4 bits.
const HALVES: [&str; 2] = ["BF16", "F16"];

#[derive(Debug)]
pub(super) struct Nunchaku;

impl Handler for Nunchaku {
    fn name(&self) -> &'static str {
        "nunchaku"
    }

    fn priority(&self) -> u32 {
        2
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        packed_as(evidence.header(), "qweight", None, &["wscales"])
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let named = |name: &str| inside(module(weight), name);
        let data = tensor(header, weight, &named("qweight"))?;
        evidence.marker_of(weight, &[], &format!("of Nunchaku ({})", described(data)))?;
        if header.get(weight).is_some() {
            return Err(QuantError::NotUnderstood {
                layer: weight.into(),
                tensor: data.name.clone(),
                why: "the weight is there as well".into(),
            });
        }
        let refuse = |need: &str| QuantError::PartKind {
            layer: weight.into(),
            tensor: data.name.clone(),
            have: described(data),
            need: need.into(),
        };
        let [height, width] = two(weight, data, "a matrix, as those of Nunchaku")?;
        let columns = width.saturating_mul(2);
        let mut found = if is(data, "I32") {
            let rows = height.saturating_mul(4);
            let count = elements(&[rows, columns / AWQ_GROUP]).unwrap_or(0);
            if count == 0 || !columns.is_multiple_of(AWQ_GROUP) {
                return Err(refuse("whole tiles of AWQ"));
            }
            let parts = [
                (PartRole::Data, data),
                (PartRole::Scale, checked(header, weight, &named("wscales"), &HALVES, count)?),
                (PartRole::ZeroPoint, checked(header, weight, &named("wzeros"), &HALVES, count)?),
            ];
            draft(header, weight, &[rows, columns], Format::NunchakuAwq, &parts)
        } else if is(data, "I8") || is(data, "U8") {
            svdq(evidence, weight, [height, columns])?
        } else {
            return Err(refuse("I8 or I32"));
        };
        // What inputs were smoothed with before the calibration; nothing reads it.
        let unused = named("smooth_factor_orig");
        found.hints.extend(header.get(&unused).map(|_| unused));
        Ok(found)
    }
}

fn svdq(evidence: &Evidence<'_>, weight: &str, [rows, columns]: [u64; 2]) -> Result<Described> {
    let header = evidence.header();
    let named = |name: &str| inside(module(weight), name);
    let data = tensor(header, weight, &named("qweight"))?;
    let down = tensor(header, weight, &named("proj_down"))?;
    let [_, rank] = two(weight, down, "a matrix of as many rows as the weight has columns")?;
    let tiled = rows > 0
        && columns > 0
        && rows.is_multiple_of(TILE)
        && columns.is_multiple_of(TILE)
        && rank.is_multiple_of(RANKS);
    let Some(count) = elements(&[rows, columns]).filter(|_| tiled) else {
        return Err(QuantError::PartKind {
            layer: weight.into(),
            tensor: data.name.clone(),
            have: format!("{}, of rank {rank}", described(data)),
            need: format!("whole tiles of {TILE} × {TILE} numbers, of a rank that {RANKS} divides"),
        });
    };
    let fp4 = is(tensor(header, weight, &named("wscales"))?, "F8_E4M3");
    let (kind, kinds) = if fp4 { (SvdqKind::Fp4, &["F8_E4M3"][..]) } else { (SvdqKind::Int4, &HALVES[..]) };
    let format = Svdq { kind, rank };
    let ranks = |length: u64| elements(&[length, rank]).unwrap_or(u64::MAX);
    let half = |name: &str, count| checked(header, weight, &named(name), &HALVES, count);
    let mut parts = vec![
        (PartRole::Data, data),
        (PartRole::Scale, checked(header, weight, &named("wscales"), kinds, count / format.group())?),
        (PartRole::Smooth, half("smooth_factor", columns)?),
        (PartRole::LowRankDown, half("proj_down", ranks(columns))?),
        (PartRole::LowRankUp, half("proj_up", ranks(rows))?),
    ];
    // Only FP4 has these; on INT4 they stay, and are refused as a sign of something else.
    if fp4 && header.get(&named("wcscales")).is_some() {
        parts.push((PartRole::RowScale, half("wcscales", rows)?));
    }
    if fp4 && header.get(&named("wtscale")).is_some() {
        let whole = checked(header, weight, &named("wtscale"), &["F32", "BF16", "F16"], 1)?;
        parts.push((PartRole::GlobalScale, whole));
    }
    Ok(draft(header, weight, &[rows, columns], Format::Svdq(format), &parts))
}
