//! optimum-quanto: qint8, qfloat8, qint4 and qint2, as their tensors say, and as the file's map of quantized modules confirms.

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, elements, inside, is, is_fp8, module};
use super::{checked, draft, laid_out, tensor, two};
use crate::error::{QuantError, Result};
use crate::formats::{Codes, Family, Global, QuantoBits, Scaled};
use crate::weight::{Format, PartRole};

/// The types that scales come in.
const FLOATS: [&str; 3] = ["F32", "F16", "BF16"];

#[derive(Debug)]
pub(super) struct Quanto;

impl Handler for Quanto {
    fn name(&self) -> &'static str {
        "quanto"
    }

    fn priority(&self) -> u32 {
        5
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let header = evidence.header();
        let names = header.tensors().filter_map(|tensor| {
            let weight = tensor.name.strip_suffix("._data")?;
            let weight = weight.strip_suffix("._data").unwrap_or(weight);
            let scaled = header.get(&format!("{weight}._scale")).is_some();
            (scaled || evidence.quanto(weight).is_some()).then(|| weight.to_owned())
        });
        names.collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let plain = format!("{weight}._data");
        let Some(data) = header.get(&plain) else { return bits(evidence, weight) };
        let (family, codes, names) = match () {
            () if is(data, "I8") => (Family::QInt8, Codes::Int8, &["qint8"][..]),
            () if is(data, "F8_E5M2") => (Family::QFloat8, Codes::E5m2, &["qfloat8_e5m2"][..]),
            () if is_fp8(data) => (Family::QFloat8, Codes::E4m3, &["qfloat8", "qfloat8_e4m3fn"][..]),
            () => {
                return Err(QuantError::PartKind {
                    layer: weight.into(),
                    tensor: plain,
                    have: described(data),
                    need: "I8 or FP8".into(),
                });
            }
        };
        agrees(evidence, weight, names, &described(data))?;
        let scale = tensor(header, weight, &format!("{weight}._scale"))?;
        let scales = laid_out(weight, &data.shape, scale, None)?;
        let global = Global::None;
        let format = Format::Scaled(Scaled { family, codes, scales, global, zero_point: false });
        let parts = [(PartRole::Data, data), (PartRole::Scale, scale)];
        Ok(draft(header, weight, &data.shape, format, &parts))
    }
}

/// An error if the map names another type.
fn agrees(evidence: &Evidence<'_>, weight: &str, names: &[&str], found: &str) -> Result<()> {
    match evidence.quanto(weight) {
        Some(says) if !names.contains(&says) => Err(QuantError::Contradiction {
            layer: weight.into(),
            says: says.into(),
            found: format!("{} ({found})", names.join(" or ")),
        }),
        _ => Ok(()),
    }
}

fn bits(evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
    let header = evidence.header();
    let data = tensor(header, weight, &format!("{weight}._data._data"))?;
    let [rows, group] = two(weight, data, "a matrix, a group a row")?;
    let scale = tensor(header, weight, &format!("{weight}._scale"))?;
    let refuse = |need: &str| QuantError::PartKind {
        layer: weight.into(),
        tensor: data.name.clone(),
        have: described(data),
        need: need.into(),
    };
    let groups = elements(&scale.shape).filter(|_| is(data, "U8") && group > 0);
    let groups = groups.ok_or_else(|| refuse("U8, and groups with something in them"))?;
    let fits = [(4, 2), (2, 4)].into_iter().filter(|(_, per_byte)| groups.div_ceil(*per_byte) == rows);
    let fits: Vec<u32> = fits.map(|(bits, _)| bits).collect();
    let said = match evidence.quanto(weight) {
        Some("qint4") => Some(4),
        Some("qint2") => Some(2),
        Some(_) => {
            return agrees(evidence, weight, &["qint4", "qint2"], &described(data)).and(Err(refuse("else")));
        }
        None => None,
    };
    let bits = match (said, &fits[..]) {
        (Some(bits), fits) if fits.contains(&bits) => bits,
        (None, &[bits]) => bits,
        _ => return Err(refuse(&format!("{groups} groups of 4 or of 2 bits, as the file's map says"))),
    };
    let scale = checked(header, weight, &scale.name, &FLOATS, groups)?;
    let shifts = ["F32", "F16", "BF16", "I8", "U8"];
    let shift = checked(header, weight, &format!("{weight}._shift"), &shifts, groups)?;
    let parts = [(PartRole::Data, data), (PartRole::Scale, scale), (PartRole::ZeroPoint, shift)];
    let format = Format::QuantoBits(QuantoBits { bits, group });
    // Nothing in the file says how many rows there are, but the length of a bias.
    let bias = header.get(&inside(module(weight), "bias")).and_then(|bias| match bias.shape[..] {
        [rows] if rows > 0 && groups.is_multiple_of(rows) => {
            Some([rows, (groups / rows).checked_mul(group)?])
        }
        _ => None,
    });
    let mut described = draft(header, weight, &bias.unwrap_or([groups, group]), format, &parts);
    if bias.is_none() {
        described.notes.push("its shape is not in the file; it is described by rows of one group".into());
    }
    Ok(described)
}
