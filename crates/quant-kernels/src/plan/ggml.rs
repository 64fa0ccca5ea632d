//! Blocks of ggml.

use checkpoint::gguf::GgmlType;
use quant_router::PartRole;

use super::Job;
use super::run::{Kernel, Run, pieces};
use crate::error::Result;
use crate::family::Family;
use crate::launch::Launch;

/// The kernel of a type; none for types that have no blocks.
pub(super) fn kernel(kind: GgmlType) -> Option<(Family, &'static str)> {
    use Family::{GgmlCodebook, GgmlK, GgmlSimple, GgmlTable, GgmlTernary};
    Some(match kind {
        GgmlType::Q4_0 => (GgmlSimple, "q4_0"),
        GgmlType::Q4_1 => (GgmlSimple, "q4_1"),
        GgmlType::Q5_0 => (GgmlSimple, "q5_0"),
        GgmlType::Q5_1 => (GgmlSimple, "q5_1"),
        GgmlType::Q8_0 => (GgmlSimple, "q8_0"),
        GgmlType::Q8_1 => (GgmlSimple, "q8_1"),
        GgmlType::Q1_0 => (GgmlSimple, "q1_0"),
        GgmlType::Q2_0 => (GgmlSimple, "q2_0"),
        GgmlType::Q2_K => (GgmlK, "q2_k"),
        GgmlType::Q3_K => (GgmlK, "q3_k"),
        GgmlType::Q4_K => (GgmlK, "q4_k"),
        GgmlType::Q5_K => (GgmlK, "q5_k"),
        GgmlType::Q6_K => (GgmlK, "q6_k"),
        GgmlType::Q8_K => (GgmlK, "q8_k"),
        GgmlType::IQ4_NL => (GgmlTable, "iq4_nl"),
        GgmlType::IQ4_XS => (GgmlTable, "iq4_xs"),
        GgmlType::MXFP4 => (GgmlTable, "mxfp4"),
        GgmlType::NVFP4 => (GgmlTable, "nvfp4"),
        GgmlType::TQ1_0 => (GgmlTernary, "tq1_0"),
        GgmlType::TQ2_0 => (GgmlTernary, "tq2_0"),
        GgmlType::IQ1_S => (GgmlCodebook, "iq1_s"),
        GgmlType::IQ1_M => (GgmlCodebook, "iq1_m"),
        GgmlType::IQ2_XXS => (GgmlCodebook, "iq2_xxs"),
        GgmlType::IQ2_XS => (GgmlCodebook, "iq2_xs"),
        GgmlType::IQ2_S => (GgmlCodebook, "iq2_s"),
        GgmlType::IQ3_XXS => (GgmlCodebook, "iq3_xxs"),
        GgmlType::IQ3_S => (GgmlCodebook, "iq3_s"),
        _ => return None,
    })
}

/// Blocks go on over the ends of rows where a converter flattened the shape, so that only their sum has to be whole.
pub(super) fn plan(job: &Job<'_>, to: Kernel, kind: GgmlType) -> Result<Vec<Launch>> {
    let weight = job.weight;
    let need = kind.row_bytes(weight.elements()?);
    let need = need.ok_or_else(|| job.unsupported("its elements are no whole number of blocks"))?;
    let data = job.parts.bytes(weight, weight.needs(PartRole::Data)?, need, 1)?;
    let (bytes, granule) = (kind.block_bytes(), kind.block_elements());
    let launch = |(first, end, out): (u64, u64, u64)| {
        let base = first - first % granule;
        let run = Run {
            data: data + base / granule * bytes,
            bytes: (end - base).div_ceil(granule) * bytes,
            first: first - base,
            end: end - base,
            out,
            granule,
        };
        to.launch(run.tiles(job.kind), run.words(job.kind))
    };
    Ok(pieces(job).map(launch).collect())
}
