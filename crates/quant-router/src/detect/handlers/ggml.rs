//! Blocks of ggml, which say themselves what they are.

use checkpoint::TensorType;

use super::super::handler::{Described, Evidence, Handler};
use super::tensor;
use crate::error::Result;
use crate::weight::QuantWeight;

#[derive(Debug)]
pub(super) struct Ggml;

impl Handler for Ggml {
    fn name(&self) -> &'static str {
        "gguf"
    }

    fn detect(&self, evidence: &Evidence<'_>) -> Vec<String> {
        let packed = |kind| matches!(kind, TensorType::Ggml(kind) if kind.is_quantized());
        let tensors = evidence.header().tensors();
        tensors.filter(|tensor| packed(tensor.kind)).map(|tensor| tensor.name.clone()).collect()
    }

    fn describe(&self, evidence: &Evidence<'_>, weight: &str) -> Result<Described> {
        Ok(Described::new(QuantWeight::ggml(tensor(evidence.header(), weight, weight)?)?))
    }
}
