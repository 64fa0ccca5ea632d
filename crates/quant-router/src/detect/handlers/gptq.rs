//! GPTQ and AWQ: words of packed numbers with scales and zero points beside them. Which of the two it is, and in how many bits, is in the
//! shapes.

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, inside, is, module};
use super::{draft, packed_as, tensor, two};
use crate::error::{QuantError, Result};
use crate::formats::{Number, PackedInt, Words};
use crate::weight::{Format, PartRole};

#[derive(Debug)]
pub(super) struct Gptq;

impl Handler for Gptq {
    fn name(&self) -> &'static str {
        "gptq"
    }

    fn priority(&self) -> u32 {
        6
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        packed_as(evidence.header(), "qweight", Some("I32"), &["scales", "qzeros"])
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let named = |name: &str| inside(module(weight), name);
        let [data, scale, zero] =
            ["qweight", "scales", "qzeros"].map(|name| tensor(header, weight, &named(name)));
        let (data, scale, zero) = (data?, scale?, zero?);
        let index = header.get(&named("g_idx"));
        let refuse = |need: &str| QuantError::PartKind {
            layer: weight.into(),
            tensor: data.name.clone(),
            have: format!(
                "{}, with scales {} and zero points {}",
                described(data),
                described(scale),
                described(zero)
            ),
            need: need.into(),
        };
        let [height, width] = two(weight, data, "a matrix of words")?;
        let [groups, rows] = two(weight, scale, "a matrix, a group a row")?;
        let [zero_groups, zero_words] = two(weight, zero, "a matrix, a group a row")?;
        if !Number::of(scale.kind).is_some_and(Number::is_float) || !is(zero, "I32") {
            return Err(refuse("scales of floats, and zero points in words"));
        }
        let whole = |bits: u64| zero_words.checked_mul(32) == rows.checked_mul(bits);
        let bits = [2_u32, 3, 4, 8].into_iter().find(|&bits| whole(bits.into()));
        let bits = bits.filter(|_| rows > 0 && groups > 0 && zero_groups == groups);
        let bits =
            bits.ok_or_else(|| refuse("numbers of 2, 3, 4 or 8 bits, and as many zero points as scales"))?;
        // Where words hold no whole numbers, three of them do.
        let columns = height.checked_mul(32).filter(|all| all.is_multiple_of(bits.into()));
        let (words, columns) = if let Some(columns) = columns.filter(|_| width == rows) {
            (Words::Columns, columns / u64::from(bits))
        } else if width.checked_mul(8) == Some(rows) && bits == 4 {
            (Words::Rows, height)
        } else {
            return Err(refuse(
                "words of columns, as in files of GPTQ, or of eight rows, as AWQ's for its GEMM",
            ));
        };
        let found = if words == Words::Columns { "gptq" } else { "awq" };
        let config = evidence.config(weight)?;
        let contradiction = |says: String, found: String| {
            let found = format!("{found} ({})", described(data));
            QuantError::Contradiction { layer: weight.into(), says, found }
        };
        if let Some(says @ ("gptq" | "awq")) = config.get("quant_method")
            && says != found
        {
            return Err(contradiction(says.into(), found.into()));
        }
        // Settings by layer, as GPTQModel has them under `dynamic`, may differ from those of the file.
        let said = |keys: [&str; 2]| {
            let text = keys.into_iter().find_map(|key| config.get(key));
            text.filter(|_| config.get("dynamic").is_none())
        };
        if let Some(says) = said(["bits", "w_bit"]).filter(|says| says.parse() != Ok(bits)) {
            return Err(contradiction(format!("of {says} bits"), format!("of {bits} bits")));
        }
        let mut group = columns.div_ceil(groups);
        if let Some(says) = said(["group_size", "q_group_size"]) {
            // A last group may be smaller, which the shapes do not tell.
            let size = match says.parse::<i64>() {
                Ok(-1) => columns,
                Ok(size) => size.try_into().unwrap_or(0),
                Err(_) => 0,
            };
            if size == 0 || columns.div_ceil(size) != groups {
                let (says, found) =
                    (format!("in groups of {says}"), format!("{groups} groups for {columns} columns"));
                return Err(contradiction(says, found));
            }
            group = size;
        }
        if columns == 0 || columns.div_ceil(group.max(1)) != groups {
            return Err(refuse("groups that the columns fill"));
        }
        if let Some(says) = config.get("checkpoint_format")
            && words == Words::Columns
            && !["gptq", "gptq_v2"].contains(&says)
        {
            return Err(contradiction(
                format!("in the checkpoint format {says:?}"),
                "laid out as gptq or gptq_v2".into(),
            ));
        }
        let mut parts = vec![(PartRole::Data, data), (PartRole::Scale, scale), (PartRole::ZeroPoint, zero)];
        if let Some(index) = index {
            if !is(index, "I32") || index.shape != [columns] {
                return Err(refuse(&format!(
                    "a group for each of {columns} columns; g_idx is {}",
                    described(index)
                )));
            }
            parts.push((PartRole::GroupIndex, index));
        }
        let zero_less_one = words == Words::Columns && config.get("checkpoint_format") != Some("gptq_v2");
        let format =
            PackedInt { bits, words, group, indexed: index.is_some(), zero_less_one, symmetric: false };
        Ok(draft(header, weight, &[rows, columns], Format::PackedInt(format), &parts))
    }
}
