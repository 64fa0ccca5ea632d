//! MXFP8: blocks of 32 FP8 numbers with powers of two as scales.

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, is, is_fp8};
use super::{draft, tensor, two};
use crate::error::{QuantError, Result};
use crate::formats::grid::swizzled;
use crate::formats::{Codes, Family, Global, Order, Scaled, Scales};
use crate::weight::{Format, PartRole};

/// Columns that share a scale.
const BLOCK: u64 = 32;

#[derive(Debug)]
pub(super) struct MxFp8;

impl Handler for MxFp8 {
    fn name(&self) -> &'static str {
        "mxfp8"
    }

    fn priority(&self) -> u32 {
        9
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let header = evidence.header();
        let scaled = header.tensors().filter(|tensor| {
            is_fp8(tensor)
                && header
                    .get(&format!("{}_scale", tensor.name))
                    .is_some_and(|scale| is(scale, "U8") || is(scale, "F8_E8M0"))
        });
        scaled.map(|tensor| tensor.name.clone()).collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let data = tensor(header, weight, weight)?;
        let marker = evidence.marker_of(weight, &["mxfp8"], &format!("MXFP8 ({})", described(data)))?;
        let [rows, columns] = two(weight, data, "a matrix, as MXFP8")?;
        let scale = tensor(header, weight, &format!("{weight}_scale"))?;
        let refuse = |need: String| QuantError::PartKind {
            layer: weight.into(),
            tensor: scale.name.clone(),
            have: described(scale),
            need,
        };
        if !columns.is_multiple_of(BLOCK) {
            return Err(refuse(format!(
                "of no row of {columns} numbers, since MXFP8 scales {BLOCK} at a time"
            )));
        }
        let plain = [rows, columns / BLOCK];
        let tiled = swizzled(plain);
        let named = marker.is_some_and(|marker| marker.format.is_some());
        let order = if named && scale.shape == tiled {
            Order::Swizzled
        } else if plain == tiled && scale.shape == plain {
            // Both orders have this shape.
            return Err(refuse(
                "described by the file: these MXFP8 scales may be in tiles or in rows".into(),
            ));
        } else if scale.shape == tiled {
            Order::Swizzled
        } else if scale.shape == plain && !named {
            Order::Rows
        } else {
            return Err(refuse(format!("{tiled:?} in tiles or {plain:?} in rows, as MXFP8")));
        };
        let codes = if is(data, "F8_E5M2") { Codes::E5m2 } else { Codes::E4m3 };
        let scales = Scales::Blocks { rows: 1, columns: BLOCK, order };
        let global = Global::None;
        let format =
            Format::Scaled(Scaled { family: Family::MxFp8, codes, scales, global, zero_point: false });
        let parts = [(PartRole::Data, data), (PartRole::Scale, scale)];
        Ok(draft(header, weight, &[rows, columns], format, &parts))
    }
}
