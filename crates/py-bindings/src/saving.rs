//! Writing a checkpoint from tensors in CPU memory.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 converts lists into owned values")]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use checkpoint::safetensors::dtype_from_name;
use checkpoint::{Order, TensorOut, WriteOptions};
use pyo3::prelude::*;

use crate::dlpack;
use crate::error::{Class, Failure};
use crate::watched::watched;

/// A tensor as Python passes it: name, type as files spell it, shape, address, bytes.
type Row = (String, String, Vec<u64>, u64, u64);

/// Writes a safetensors file, whole or not at all.
#[pyfunction]
pub(crate) fn save(
    py: Python<'_>,
    path: PathBuf,
    tensors: Vec<Row>,
    metadata: BTreeMap<String, String>,
    watch: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let mut out = Vec::with_capacity(tensors.len());
    for (name, dtype, shape, address, size) in &tensors {
        let Some(dtype) = dtype_from_name(dtype) else {
            return Err(Failure::new(Class::Internal, format!("{name} has the unknown type {dtype}")).into());
        };
        out.push(TensorOut { name, dtype, shape, bytes: dlpack::bytes(*address, *size) });
    }
    watched(py, watch, move |cancel, done| {
        let done = Arc::clone(done);
        let options = WriteOptions {
            metadata,
            cancel: Some(cancel.clone()),
            progress: Some(Arc::new(move |bytes| done.store(bytes, Ordering::Relaxed))),
            // Weights then start at pages, where they can be locked and read directly without their neighbours.
            order: Order::Aligned,
            ..WriteOptions::default()
        };
        checkpoint::write(&path, &out, &options)
    })
}
