//! Adapter files as Python sees them: a plan for a file on a model, and the adapters it puts on layers.
#![expect(clippy::needless_pass_by_value, reason = "PyO3 converts lists into owned values")]

use std::collections::{BTreeMap, HashMap};

use lora_runtime::reference::{self, Values};
use lora_runtime::{
    AdapterFile, AdapterTensor, Layer, Layers, LoraError, Part, Refused, ResolveOptions, Role, resolve,
};
use pyo3::prelude::*;

use crate::dlpack;
use crate::error::{Class, Failure, guarded};

/// A tensor of the file as Python sees it: key, first row and the row past the last, or none for all.
type PartRows = (String, Option<u64>, Option<u64>);

impl From<LoraError> for Failure {
    fn from(error: LoraError) -> Self {
        Self::new(Class::Model, error.to_string())
    }
}

fn pairs(list: &[Refused]) -> Vec<(String, String)> {
    list.iter().map(|one| (one.key.clone(), one.reason.clone())).collect()
}

/// Of tensors of a file (type, address and bytes), those that hold NaN or infinity: which, the first such element, whether it is infinite.
#[pyfunction]
pub(crate) fn not_finite(
    py: Python<'_>,
    tensors: Vec<(String, u64, u64)>,
) -> PyResult<Vec<(usize, usize, bool)>> {
    let run = || {
        let tensors: Vec<_> = tensors
            .iter()
            .map(|(dtype, address, size)| (dtype.as_str(), dlpack::bytes(*address, *size)))
            .collect();
        let found = lora_runtime::not_finite(&tensors);
        Ok(found.into_iter().map(|one| (one.tensor, one.element, one.infinite)).collect())
    };
    Ok(py.detach(|| guarded(run))?)
}

/// What an adapter file does to a model.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct AdapterPlan {
    inner: lora_runtime::AdapterPlan,
}

#[pymethods]
impl AdapterPlan {
    #[new]
    #[pyo3(signature = (
        layers, tensors, scalars, metadata, *, config=None, split=None, component=None, ignore_variations=false
    ))]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        layers: Vec<(String, String, Vec<u64>, bool)>,
        tensors: Vec<(String, String, Vec<u64>)>,
        scalars: HashMap<String, f64>,
        metadata: BTreeMap<String, String>,
        config: Option<String>,
        split: Option<String>,
        component: Option<String>,
        ignore_variations: bool,
    ) -> PyResult<Self> {
        let run = || {
            let layers: Result<Vec<_>, _> = layers
                .iter()
                .map(|(name, kind, shape, bias)| Layer::parse(name, kind, shape.clone(), *bias))
                .collect();
            let layers = Layers::new(layers?)?;
            let tensors = tensors.into_iter().map(|(key, dtype, shape)| AdapterTensor { key, dtype, shape });
            let file =
                AdapterFile::new(tensors)?.with_scalars(scalars).with_metadata(metadata).with_config(config);
            let options = ResolveOptions { split, component, ignore_variations };
            Ok(Self { inner: resolve(&layers, &file, &options)? })
        };
        Ok(py.detach(|| guarded(run))?)
    }

    fn targets(&self) -> Vec<AdapterTarget> {
        self.inner.targets.iter().map(|target| AdapterTarget { inner: target.clone() }).collect()
    }

    fn applied(&self) -> Vec<&str> {
        self.inner.applied()
    }

    fn absent(&self) -> Vec<(String, Vec<String>)> {
        self.inner.absent.iter().map(|absent| (absent.summary.clone(), absent.keys.clone())).collect()
    }

    fn refused(&self) -> Vec<(String, String)> {
        pairs(&self.inner.refused)
    }

    fn skipped(&self) -> Vec<(String, String)> {
        let absent = self.inner.absent.iter();
        let absent = absent.flat_map(|one| one.keys.iter().map(|key| (key.clone(), one.summary.clone())));
        absent.chain(pairs(&self.inner.skipped)).collect()
    }

    fn checkpoint(&self) -> Option<&str> {
        self.inner.checkpoint.as_deref()
    }

    fn notes(&self) -> Vec<String> {
        self.inner.notes.clone()
    }

    fn report(&self) -> String {
        self.inner.report()
    }

    fn __repr__(&self) -> String {
        let plan = &self.inner;
        format!(
            "AdapterPlan({} targets, {} keys applied, {} refused)",
            plan.targets.len(),
            plan.applied().len(),
            plan.refused.len()
        )
    }
}

/// One adapter on one layer.
#[pyclass(frozen, module = "weightstream._native")]
#[derive(Debug)]
pub(crate) struct AdapterTarget {
    inner: lora_runtime::AdapterTarget,
}

fn part(part: &Part) -> PartRows {
    let rows = part.rows.as_ref();
    (part.key.clone(), rows.map(|rows| rows.start), rows.map(|rows| rows.end))
}

/// One of the reference's functions.
type Merge = fn(&lora_runtime::AdapterTarget, &[f64], &Values<'_>, f64) -> Result<Vec<f64>, LoraError>;

/// The numbers of a tensor in F32.
fn numbers((address, size): (u64, u64)) -> Vec<f64> {
    let bytes = dlpack::bytes(address, size).chunks_exact(size_of::<f32>());
    bytes.map(|four| f64::from(f32::from_le_bytes([four[0], four[1], four[2], four[3]]))).collect()
}

impl AdapterTarget {
    fn merge(
        &self,
        merge: Merge,
        base: (u64, u64),
        parts: &HashMap<String, (u64, u64)>,
        multiplier: f64,
        out: (u64, u64),
    ) -> Result<(), Failure> {
        let named = |role: &&Role| parts.get(role.name()).map(|part| (**role, numbers(*part)));
        let read: BTreeMap<Role, Vec<f64>> = Role::ALL.iter().filter_map(|role| named(&role)).collect();
        let values: Values<'_> = read.iter().map(|(role, numbers)| (*role, numbers.as_slice())).collect();
        let merged = merge(&self.inner, &numbers(base), &values, multiplier)?;
        let out = dlpack::numbers_mut::<f32>(out.0, out.1)?;
        if out.len() != merged.len() {
            let text =
                format!("the target has room for {} numbers, and there are {}", out.len(), merged.len());
            return Err(Failure::new(Class::Internal, text));
        }
        for (out, number) in out.iter_mut().zip(merged) {
            *out = number as f32;
        }
        Ok(())
    }
}

#[pymethods]
impl AdapterTarget {
    #[getter]
    fn layer(&self) -> &str {
        &self.inner.layer
    }

    #[getter]
    fn kind(&self) -> &'static str {
        self.inner.kind.name()
    }

    #[getter]
    fn parts(&self) -> HashMap<&'static str, PartRows> {
        self.inner.parts.iter().map(|(role, one)| (role.name(), part(one))).collect()
    }

    #[getter]
    fn rows(&self) -> Option<(u64, u64)> {
        self.inner.rows.as_ref().map(|rows| (rows.start, rows.end))
    }

    #[getter]
    #[allow(
        clippy::unused_self,
        reason = "a property of every target; adapters of parts along inputs would have one"
    )]
    fn columns(&self) -> Option<(u64, u64)> {
        None
    }

    #[getter]
    fn cut(&self) -> Option<(u64, u64)> {
        self.inner.cut.as_ref().map(|rows| (rows.start, rows.end))
    }

    #[getter]
    fn rank(&self) -> u64 {
        self.inner.rank
    }

    #[getter]
    fn scale(&self) -> f64 {
        self.inner.scale
    }

    #[getter]
    fn axis(&self) -> Option<u8> {
        self.inner.axis
    }

    #[getter]
    fn series(&self) -> Option<u32> {
        self.inner.series
    }

    #[getter]
    fn constraint(&self) -> Option<f64> {
        self.inner.constraint
    }

    #[getter]
    fn transposed(&self) -> bool {
        self.inner.transposed
    }

    fn merged(
        &self,
        py: Python<'_>,
        weight: (u64, u64),
        parts: HashMap<String, (u64, u64)>,
        multiplier: f64,
        out: (u64, u64),
    ) -> PyResult<()> {
        Ok(py.detach(|| guarded(|| self.merge(reference::merged_weight, weight, &parts, multiplier, out)))?)
    }

    fn merged_bias(
        &self,
        py: Python<'_>,
        bias: (u64, u64),
        parts: HashMap<String, (u64, u64)>,
        multiplier: f64,
        out: (u64, u64),
    ) -> PyResult<()> {
        Ok(py.detach(|| guarded(|| self.merge(reference::merged_bias, bias, &parts, multiplier, out)))?)
    }

    fn __repr__(&self) -> String {
        let target = &self.inner;
        format!(
            "AdapterTarget({:?}, {:?}, rank {}, scale {})",
            target.layer,
            target.kind.name(),
            target.rank,
            target.scale
        )
    }
}
