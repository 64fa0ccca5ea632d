//! Detection over names, types and shapes that Python gives, whatever they are of: a file's header or tensors in memory.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 converts lists into owned values")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;

use checkpoint::{TensorInfo, TensorType};
use pyo3::prelude::*;
use quant_router::detect::{Handlers, Header};
use quant_router::kind_from_name;

use super::QuantWeight;
use crate::error::{Class, Failure};

/// A tensor as Python gives it: name, type as files spell it, shape.
type Row = (String, String, Vec<u64>);
/// What was found: weights with the handlers that described them, hints, notes.
type Found = (Vec<(QuantWeight, String)>, Vec<String>, Vec<String>);

fn tensor((name, kind, shape): &Row) -> Result<TensorInfo, Failure> {
    let refuse = |why: &str| Failure::new(Class::Quantization, format!("{name:?}, {kind} {shape:?}: {why}"));
    let kind = kind_from_name(kind).ok_or_else(|| refuse("it has an unknown type"))?;
    let large = || refuse("it has more elements than can be counted");
    let elements = if shape.contains(&0) {
        0
    } else {
        shape.iter().try_fold(1_u64, |all, &next| all.checked_mul(next)).ok_or_else(large)?
    };
    let bytes = match kind {
        TensorType::Plain(dtype) => {
            elements.checked_mul(dtype.bitsize() as u64).ok_or_else(large)?.div_ceil(8)
        }
        TensorType::Ggml(kind) => {
            kind.row_bytes(elements).ok_or_else(|| refuse("its elements are no whole blocks"))?
        }
        _ => return Err(refuse("it has an unknown type")),
    };
    Ok(TensorInfo { name: name.clone(), kind, shape: shape.clone(), file: 0, range: 0..bytes })
}

fn chosen(without: &[String]) -> Handlers {
    let mut handlers = Handlers::default();
    for name in without {
        handlers.remove(name);
    }
    handlers
}

/// Runs `call` on a header. What `read` raised is what is raised, not that a tensor could not be read.
fn on_header<T>(
    tensors: &[Row],
    metadata: &BTreeMap<String, String>,
    read: &Bound<'_, PyAny>,
    call: impl FnOnce(&Header<'_>) -> quant_router::Result<T>,
) -> PyResult<T> {
    let tensors = tensors.iter().map(tensor).collect::<Result<Vec<_>, _>>()?;
    let raised = RefCell::new(None);
    let bytes = |tensor: &TensorInfo| -> io::Result<Vec<u8>> {
        read.call1((tensor.name.as_str(),)).and_then(|bytes| bytes.extract()).map_err(|error: PyErr| {
            let text = error.to_string();
            raised.replace(Some(error));
            io::Error::other(text)
        })
    };
    let answer = call(&Header::new(&tensors, metadata, &bytes));
    if let Some(error) = raised.into_inner() {
        return Err(error);
    }
    Ok(answer.map_err(Failure::from)?)
}

/// The handlers: name and priority, in the order in which they are asked.
#[pyfunction(name = "quant_handlers")]
pub(crate) fn handlers() -> Vec<(String, u32)> {
    Handlers::default().priorities().map(|(name, priority)| (name.to_owned(), priority)).collect()
}

/// Which weights are recognised, and the handler and priority that each falls to. Describes none of them.
#[pyfunction(name = "quant_claims")]
pub(crate) fn claims(
    tensors: Vec<Row>,
    metadata: BTreeMap<String, String>,
    read: &Bound<'_, PyAny>,
    without: Vec<String>,
) -> PyResult<BTreeMap<String, (String, u32)>> {
    on_header(&tensors, &metadata, read, |header| chosen(&without).claims(header))
}

/// The quantized weights of a model.
#[pyfunction(name = "quant_detect")]
pub(crate) fn detect(
    tensors: Vec<Row>,
    metadata: BTreeMap<String, String>,
    read: &Bound<'_, PyAny>,
    without: Vec<String>,
) -> PyResult<Found> {
    let detection = on_header(&tensors, &metadata, read, |header| chosen(&without).detect(header))?;
    let weights = detection.weights.into_values();
    let weights = weights.map(|found| (QuantWeight { inner: found.weight }, found.handler)).collect();
    Ok((weights, detection.hints.into_iter().collect(), detection.notes))
}
