//! FP8 weights, with their scales in every spelling, or in a file where nothing says that there are any.

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, inside, is, is_fp8, module};
use super::super::marker::TENSOR;
use super::{draft, laid_out, one_scale, tensor};
use crate::error::{QuantError, Result};
use crate::formats::{Codes, Family, Global, Scaled, Scales};
use crate::weight::{Format, PartRole};

#[derive(Debug)]
pub(super) struct Fp8;

impl Handler for Fp8 {
    fn name(&self) -> &'static str {
        "fp8"
    }

    fn priority(&self) -> u32 {
        10
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let header = evidence.header();
        let is_scale = |name: &str| {
            let scaled = ["_scale", "_scale_inv"].iter().find_map(|ending| name.strip_suffix(ending));
            let packed = |weight: &str| header.get(&format!("{weight}_packed")).is_some();
            scaled.is_some_and(|weight| header.get(weight).is_some() || packed(weight))
                || ["scaled_fp8", "wscales", "wcscales", "scale_weight", "weight_s_rel"]
                    .contains(&name.rsplit('.').next().unwrap_or(name))
                || name.contains("._data")
                || name.contains("._scale")
                || name.ends_with("_qdata")
        };
        let fp8 = header.tensors().filter(|tensor| is_fp8(tensor) && !is_scale(&tensor.name));
        fp8.map(|tensor| tensor.name.clone()).collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let data = tensor(header, weight, weight)?;
        let (codes, formats) = if is(data, "F8_E5M2") {
            (Codes::E5m2, &["float8_e5m2"][..])
        } else {
            (Codes::E4m3, &["float8_e4m3fn", "float8_e4m3fn_rowwise", "float8_e4m3fn_blockwise"][..])
        };
        let marker = evidence.marker_of(weight, formats, &described(data))?;
        let family = Family::Fp8;
        let scaled = |scales| {
            Format::Scaled(Scaled { family, codes, scales, global: Global::None, zero_point: false })
        };
        if let Some(scale) = one_scale(header, weight)? {
            let scales = laid_out(weight, &data.shape, scale, marker.and_then(|marker| marker.group))?;
            let parts = [(PartRole::Data, data), (PartRole::Scale, scale)];
            let mut described = draft(header, weight, &data.shape, scaled(scales), &parts);
            // The other spelling, if there is one, holds the same numbers.
            let others = super::scales(header, weight).into_iter().skip(1).map(|other| other.name.clone());
            described.hints.extend(others);
            return Ok(described);
        }
        let own = inside(module(weight), TENSOR);
        let said = || marker.map(|marker| marker.source).or_else(|| header.get(&own).map(|_| own.clone()));
        if let Some(said) = said().or_else(|| evidence.fp8_is_scaled().map(str::to_owned)) {
            return Err(QuantError::NoScale {
                layer: weight.into(),
                kind: described(data),
                evidence: format!("{said:?} says that FP8 is scaled here"),
            });
        }
        Ok(draft(header, weight, &data.shape, scaled(Scales::None), &[(PartRole::Data, data)]))
    }
}
