//! Quantizing on the fly: rows in the memory of one tensor, into the memory of others.

use checkpoint::TensorType;
use checkpoint::safetensors::dtype_from_name;
use pyo3::prelude::*;
use quant_router::formats::Number;
use quant_router::{QuantBuffers, QuantKind};

use super::{QuantWeight, pool};
use crate::dlpack;
use crate::error::{Class, Failure, guarded};

/// A weight of floats that shall be quantized.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct Quantizer {
    inner: quant_router::Quantizer,
}

#[pymethods]
impl Quantizer {
    #[new]
    fn new(name: &str, shape: Vec<u64>, number: &str, kind: &str) -> PyResult<Self> {
        let unknown = |what: &str| Failure::new(Class::Quantization, format!("{name:?}: {what}"));
        let number = dtype_from_name(number).and_then(|dtype| Number::of(TensorType::Plain(dtype)));
        let number = number.ok_or_else(|| unknown("only F32, F16 and BF16 are quantized"))?;
        let kind = QuantKind::of(kind)
            .ok_or_else(|| unknown(&format!("{kind} is no type that weights are quantized to")))?;
        let inner = quant_router::Quantizer::new(name, &shape, number, kind).map_err(Failure::from)?;
        Ok(Self { inner })
    }

    #[getter]
    fn weight(&self) -> QuantWeight {
        QuantWeight { inner: self.inner.weight().clone() }
    }

    fn quantize(
        &self,
        py: Python<'_>,
        source: (u64, u64),
        rows: (u64, u64),
        data: (u64, u64),
        scale: (u64, u64),
        shift: (u64, u64),
    ) -> PyResult<()> {
        let run = || {
            let mut into = QuantBuffers {
                data: dlpack::bytes_mut(data.0, data.1),
                scale: dlpack::bytes_mut(scale.0, scale.1),
                shift: dlpack::bytes_mut(shift.0, shift.1),
            };
            let source = dlpack::bytes(source.0, source.1);
            pool::threads()?.install(|| self.inner.quantize(source, rows.0..rows.1, &mut into))?;
            Ok(())
        };
        Ok(py.detach(|| guarded(run))?)
    }
}
