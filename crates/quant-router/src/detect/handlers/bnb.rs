//! bitsandbytes: NF4 and FP4, whose scales may be quantized themselves, and row-wise INT8.

use serde::Deserialize;

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, elements, inside, is, module};
use super::{checked, draft, tensor, two};
use crate::error::{QuantError, Result};
use crate::formats::{Bnb4, BnbKind, Codes, Family, Global, Nested, Scaled, Scales};
use crate::weight::{Format, PartRole};

/// What follows a weight's name where its description is.
const STATES: [(&str, BnbKind, &str); 2] = [
    (".quant_state.bitsandbytes__nf4", BnbKind::Nf4, "nf4"),
    (".quant_state.bitsandbytes__fp4", BnbKind::Fp4, "fp4"),
];

/// The description, in JSON.
#[derive(Debug, Deserialize)]
struct State {
    quant_type: String,
    blocksize: u64,
    shape: Vec<u64>,
    nested_blocksize: Option<u64>,
    nested_dtype: Option<String>,
    nested_offset: Option<f32>,
}

#[derive(Debug)]
pub(super) struct Bnb;

impl Handler for Bnb {
    fn name(&self) -> &'static str {
        "bitsandbytes"
    }

    fn priority(&self) -> u32 {
        3
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let header = evidence.header();
        let names = header.tensors().filter_map(|tensor| {
            let name = tensor.name.as_str();
            let described = STATES.iter().find_map(|(state, ..)| name.strip_suffix(state));
            let scaled = || {
                let scaled = is(tensor, "I8") && header.get(&inside(module(name), "SCB")).is_some();
                (scaled && (name == "weight" || name.ends_with(".weight"))).then_some(name)
            };
            described.or_else(scaled)
        });
        names.map(str::to_owned).collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let header = evidence.header();
        let data = tensor(header, weight, weight)?;
        evidence.marker_of(weight, &[], &format!("bitsandbytes ({})", described(data)))?;
        let states = STATES.map(|(state, kind, name)| (header.get(&format!("{weight}{state}")), kind, name));
        let mut found = states.into_iter().filter_map(|(state, kind, name)| Some((state?, kind, name)));
        match (found.next(), found.next()) {
            (Some((state, kind, name)), None) => four_bits(evidence, weight, state, kind, name),
            (Some((state, ..)), Some(_)) => Err(QuantError::NotUnderstood {
                layer: weight.into(),
                tensor: state.name.clone(),
                why: "it is described as NF4 and as FP4".into(),
            }),
            (None, _) => int8(evidence, weight),
        }
    }
}

fn four_bits(
    evidence: &Evidence<'_>,
    weight: &str,
    state: &checkpoint::TensorInfo,
    kind: BnbKind,
    name: &str,
) -> Result<Described> {
    let header = evidence.header();
    let refuse = |why: String| QuantError::Marker { layer: weight.into(), tensor: state.name.clone(), why };
    let text = header.marker(weight, state)?;
    let said: State = serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
    if said.quant_type != name {
        return Err(refuse(format!("it says {:?}", said.quant_type)));
    }
    let Some(count) = elements(&said.shape).filter(|_| said.blocksize > 0) else {
        return Err(refuse(format!("its shape is {:?}, its blocks have {}", said.shape, said.blocksize)));
    };
    // The packed bytes may be stored as any type, in any shape.
    let data = tensor(header, weight, weight)?;
    if data.bytes() != count.div_ceil(2) {
        return Err(QuantError::PartKind {
            layer: weight.into(),
            tensor: weight.into(),
            have: described(data),
            need: format!("{} bytes, for {:?} numbers of 4 bits", count.div_ceil(2), said.shape),
        });
    }
    let own = |ending: &str| format!("{weight}.{ending}");
    let blocks = count.div_ceil(said.blocksize);
    let mut parts = vec![
        (PartRole::Data, data),
        (PartRole::Codebook, checked(header, weight, &own("quant_map"), &["F32"], 16)?),
    ];
    let nested = if is(tensor(header, weight, &own("absmax"))?, "U8") {
        let (Some(block @ 1..), Some(offset)) = (said.nested_blocksize, said.nested_offset) else {
            return Err(refuse("its scales are bytes, and it does not say of what blocks and offset".into()));
        };
        if said.nested_dtype.as_deref().is_some_and(|dtype| dtype != "float32") {
            return Err(refuse(format!("its scales are quantized as {:?}", said.nested_dtype)));
        }
        let scales = blocks.div_ceil(block);
        parts.extend([
            (PartRole::Scale, checked(header, weight, &own("absmax"), &["U8"], blocks)?),
            (PartRole::ScaleCodebook, checked(header, weight, &own("nested_quant_map"), &["F32"], 256)?),
            (PartRole::GlobalScale, checked(header, weight, &own("nested_absmax"), &["F32"], scales)?),
        ]);
        Some(Nested { block, offset_bits: offset.to_bits() })
    } else {
        parts.push((PartRole::Scale, checked(header, weight, &own("absmax"), &["F32"], blocks)?));
        None
    };
    let format = Format::Bnb4(Bnb4 { kind, block: said.blocksize, nested });
    let mut described = draft(header, weight, &said.shape, format, &parts);
    described.hints.push(state.name.clone());
    Ok(described)
}

fn int8(evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
    let header = evidence.header();
    let data = tensor(header, weight, weight)?;
    let shape = two(weight, data, "a matrix, as INT8 of bitsandbytes")?;
    let scale = checked(header, weight, &inside(module(weight), "SCB"), &["F32"], shape[0])?;
    let (family, codes, scales) = (Family::BnbInt8, Codes::Int8, Scales::Row);
    let format = Format::Scaled(Scaled { family, codes, scales, global: Global::Per127, zero_point: false });
    let parts = [(PartRole::Data, data), (PartRole::Scale, scale)];
    let mut described = draft(header, weight, &shape, format, &parts);
    if let Some(layout) = header.get(&inside(module(weight), "weight_format")) {
        // 0 is by rows; the others are for tensor cores that bitsandbytes no longer knows.
        if header.marker(weight, layout)?.iter().any(|&byte| byte != 0) {
            return Err(QuantError::NotUnderstood {
                layer: weight.into(),
                tensor: layout.name.clone(),
                why: "its numbers are not stored by rows".into(),
            });
        }
        described.hints.push(layout.name.clone());
    }
    Ok(described)
}
