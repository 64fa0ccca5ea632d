//! Quantized weights, as Python sees them: descriptions, and their numbers written into the memory of tensors.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 converts lists into owned values")]

mod detection;
mod pool;
mod quantizing;

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use half::{bf16, f16};
use pyo3::prelude::*;
use pyo3::types::PyType;
use quant_router::{Target, Transform, dequantize};

pub(crate) use detection::{claims, detect, handlers};
pub(crate) use quantizing::Quantizer;

use crate::dlpack;
use crate::error::{Class, Failure, guarded};

/// The memory of a weight's tensors: address and bytes, by the tensor's name.
type Addresses = HashMap<String, (u64, u64)>;
/// A part as Python sees it: role, tensor, type, shape.
type Part = (String, String, String, Vec<u64>);

/// What a quantized weight is and which tensors are its parts.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug, Clone)]
pub(crate) struct QuantWeight {
    pub(crate) inner: quant_router::QuantWeight,
}

/// The bytes of a weight's tensors, borrowed for one call.
fn bytes_of(parts: &Addresses) -> HashMap<String, &'static [u8]> {
    parts.iter().map(|(name, (address, size))| (name.clone(), dlpack::bytes(*address, *size))).collect()
}

/// Writes rows, one range after the other, into memory of exactly their size.
fn write<T: Copy + Send>(
    ranges: &[(u64, u64)],
    columns: u64,
    mut out: &mut [T],
    write: impl Fn(u64, u64, &mut [T]) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for &(start, end) in ranges {
        let count = (end.saturating_sub(start)).saturating_mul(columns).min(out.len() as u64);
        let (now, rest) = std::mem::take(&mut out).split_at_mut(count as usize);
        out = rest;
        write(start, end, now)?;
    }
    if out.is_empty() {
        return Ok(());
    }
    Err(Failure::new(Class::Internal, format!("the target has room for {} more numbers", out.len())))
}

impl QuantWeight {
    fn run(
        &self,
        parts: &Addresses,
        ranges: &[(u64, u64)],
        out: (u64, u64),
        dtype: &str,
    ) -> Result<(), Failure> {
        let (weight, columns, bytes) = (&self.inner, self.inner.columns(), bytes_of(parts));
        let (address, size) = out;
        pool::threads()?.install(|| match dtype {
            "F32" => write(ranges, columns, dlpack::numbers_mut::<f32>(address, size)?, |start, end, out| {
                Ok(dequantize(weight, &bytes, start..end, Target::F32(out))?)
            }),
            "BF16" => {
                write(ranges, columns, dlpack::numbers_mut::<bf16>(address, size)?, |start, end, out| {
                    Ok(dequantize(weight, &bytes, start..end, Target::Bf16(out))?)
                })
            }
            "F16" => write(ranges, columns, dlpack::numbers_mut::<f16>(address, size)?, |start, end, out| {
                Ok(dequantize(weight, &bytes, start..end, Target::F16(out))?)
            }),
            other => Err(Failure::new(Class::Internal, format!("numbers are not written as {other}"))),
        })
    }
}

#[pymethods]
impl QuantWeight {
    #[staticmethod]
    fn from_json(text: &str) -> PyResult<Self> {
        let read = serde_json::from_str::<quant_router::QuantWeight>(text);
        let inner = read.map_err(|error| {
            Failure::new(Class::Quantization, format!("a description of a weight cannot be read: {error}"))
        })?;
        let (rows, elements) = (inner.rows(), inner.elements());
        rows.and(elements).map_err(Failure::from)?;
        Ok(Self { inner })
    }

    fn to_json(&self) -> PyResult<String> {
        let text = serde_json::to_string(&self.inner);
        text.map_err(|error| Failure::new(Class::Internal, error.to_string()).into())
    }

    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.inner.shape.clone()
    }

    #[getter]
    fn format(&self) -> String {
        self.inner.format.to_string()
    }

    #[getter]
    fn block(&self) -> [u64; 2] {
        self.inner.format.block()
    }

    #[getter]
    fn rows(&self) -> PyResult<u64> {
        Ok(self.inner.rows().map_err(Failure::from)?)
    }

    #[getter]
    fn columns(&self) -> u64 {
        self.inner.columns()
    }

    #[getter]
    fn parts(&self) -> Vec<Part> {
        let part = |part: &quant_router::Part| {
            let role = serde_json::to_value(part.role).ok();
            let role = role.as_ref().and_then(serde_json::Value::as_str).unwrap_or_default().to_owned();
            (role, part.tensor.clone(), part.kind.to_string(), part.shape.clone())
        };
        self.inner.parts.iter().map(part).collect()
    }

    #[getter]
    fn transforms(&self) -> Vec<(&'static str, u64)> {
        let transform = |transform: &Transform| match transform {
            Transform::Hadamard { group } => ("Hadamard", *group),
            Transform::Multiply => ("Multiply", 0),
            _ => ("unknown", 0),
        };
        self.inner.transforms.iter().map(transform).collect()
    }

    fn renamed(&self, name: String, tensors: HashMap<String, String>) -> Self {
        let mut inner = self.inner.clone();
        inner.name = name;
        for part in &mut inner.parts {
            if let Some(tensor) = tensors.get(&part.tensor) {
                part.tensor.clone_from(tensor);
            }
        }
        Self { inner }
    }

    fn with_shape(&self, shape: Vec<u64>) -> PyResult<Self> {
        Ok(Self { inner: self.inner.clone().with_shape(&shape).map_err(Failure::from)? })
    }

    #[pyo3(signature = (parts, ranges, out, size, dtype))]
    fn dequantize(
        &self,
        py: Python<'_>,
        parts: Addresses,
        ranges: Vec<(u64, u64)>,
        out: u64,
        size: u64,
        dtype: &str,
    ) -> PyResult<()> {
        Ok(py.detach(|| guarded(|| self.run(&parts, &ranges, (out, size), dtype)))?)
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.inner == other.inner
    }

    fn __hash__(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.inner.name, &self.inner.shape, self.inner.format.to_string()).hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!("QuantWeight({:?}, {:?}, {})", self.inner.name, self.inner.shape, self.inner.format)
    }

    fn __copy__(&self) -> Self {
        self.clone()
    }

    fn __deepcopy__(&self, _memo: &Bound<'_, PyAny>) -> Self {
        self.clone()
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (String,))> {
        let class: Bound<'py, PyType> = py.get_type::<Self>();
        Ok((class.getattr("from_json")?, (self.to_json()?,)))
    }
}
