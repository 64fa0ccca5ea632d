//! Blocks of ggml, which say themselves what they are. In files that know no such types they are bytes, and the map of quantized
//! modules names the type.

use checkpoint::gguf::GgmlType;
use checkpoint::{TensorInfo, TensorType};

use super::super::handler::{Described, Evidence, Handler};
use super::super::header::{described, elements, is};
use super::tensor;
use crate::error::{QuantError, Result};
use crate::weight::QuantWeight;

#[derive(Debug)]
pub(super) struct Ggml;

/// The type of blocks that the file's map gives a weight.
fn named(evidence: &Evidence<'_>, weight: &str) -> Option<GgmlType> {
    let name = evidence.quanto(weight)?;
    GgmlType::all().find(|kind| kind.name() == name && kind.is_quantized())
}

impl Handler for Ggml {
    fn name(&self) -> &'static str {
        "gguf"
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let packed = |tensor: &&TensorInfo| match tensor.kind {
            TensorType::Ggml(kind) => kind.is_quantized(),
            _ => is(tensor, "U8") && named(evidence, &tensor.name).is_some(),
        };
        let tensors = evidence.header().tensors();
        tensors.filter(packed).map(|tensor| tensor.name.clone()).collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        let data = tensor(evidence.header(), weight, weight)?;
        let (TensorType::Plain(_), Some(kind)) = (data.kind, named(evidence, weight)) else {
            return Ok(Described::new(QuantWeight::ggml(data)?));
        };
        // A row of bytes is a row of whole blocks: files that cut rows otherwise have the types themselves.
        let rows = data.shape.split_last().and_then(|(bytes, leading)| {
            let shape = [leading, &[kind.row_elements(*bytes)?]].concat();
            elements(&shape).map(|_| shape)
        });
        let Some(shape) = rows else {
            return Err(QuantError::PartKind {
                layer: weight.into(),
                tensor: data.name.clone(),
                have: described(data),
                need: format!("rows of whole blocks of {kind}, as the file's map says"),
            });
        };
        let blocks = TensorInfo { kind: TensorType::Ggml(kind), shape, ..data.clone() };
        Ok(Described::new(QuantWeight::ggml(&blocks)?))
    }
}
