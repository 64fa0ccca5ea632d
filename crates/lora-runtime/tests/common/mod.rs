//! What the tests share: models and files in a line, and files read from the corpus.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, reason = "tests; each uses a part")]

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use checkpoint::{Checkpoint, OpenOptions, TensorInfo};
use lora_runtime::{AdapterFile, AdapterPlan, AdapterTensor, Layer, Layers, ResolveOptions, resolve};

/// A linear layer with a bias.
pub(crate) fn linear(name: &str, rows: u64, columns: u64) -> Layer {
    Layer::parse(name, "linear", vec![rows, columns], true).unwrap()
}

/// Any layer.
pub(crate) fn layer(name: &str, kind: &str, shape: &[u64], bias: bool) -> Layer {
    Layer::parse(name, kind, shape.to_vec(), bias).unwrap()
}

/// A model.
pub(crate) fn model(layers: impl IntoIterator<Item = Layer>) -> Layers {
    Layers::new(layers).unwrap()
}

/// A file in the making.
#[derive(Debug, Clone, Default)]
pub(crate) struct File {
    pub(crate) tensors: Vec<AdapterTensor>,
    pub(crate) scalars: HashMap<String, f64>,
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) config: Option<String>,
    pub(crate) options: ResolveOptions,
}

impl File {
    /// With a tensor.
    pub(crate) fn with(mut self, key: &str, dtype: &str, shape: &[u64]) -> Self {
        self.tensors.push(AdapterTensor { key: key.into(), dtype: dtype.into(), shape: shape.to_vec() });
        self
    }

    /// With two factors under kohya's endings.
    pub(crate) fn kohya(self, name: &str, rows: u64, columns: u64, rank: u64) -> Self {
        self.with(&format!("{name}.lora_down.weight"), "BF16", &[rank, columns]).with(
            &format!("{name}.lora_up.weight"),
            "BF16",
            &[rows, rank],
        )
    }

    /// With two factors under PEFT's endings.
    pub(crate) fn peft(self, name: &str, rows: u64, columns: u64, rank: u64) -> Self {
        self.with(&format!("{name}.lora_A.weight"), "BF16", &[rank, columns]).with(
            &format!("{name}.lora_B.weight"),
            "BF16",
            &[rows, rank],
        )
    }

    /// With an alpha of no dimension.
    pub(crate) fn alpha(mut self, name: &str, value: f64) -> Self {
        let key = format!("{name}.alpha");
        self.scalars.insert(key.clone(), value);
        self.with(&key, "F32", &[])
    }

    /// With a field in the header.
    pub(crate) fn field(mut self, key: &str, text: &str) -> Self {
        self.metadata.insert(key.into(), text.into());
        self
    }

    /// As the crate takes it.
    pub(crate) fn made(&self) -> AdapterFile {
        AdapterFile::new(self.tensors.clone())
            .unwrap()
            .with_scalars(self.scalars.clone())
            .with_metadata(self.metadata.clone())
            .with_config(self.config.clone())
    }

    /// The plan for a model. Every key is in exactly one list.
    pub(crate) fn plan(&self, layers: &Layers) -> AdapterPlan {
        let plan = resolve(layers, &self.made(), &self.options).unwrap();
        check_whole(&plan, self);
        plan
    }
}

/// Every key of a file is in one list of its plan, and in no other.
pub(crate) fn check_whole(plan: &AdapterPlan, file: &File) {
    let mut seen: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let refused = plan.refused.iter().map(|one| (one.key.as_str(), "refused"));
    let skipped = plan.skipped.iter().map(|one| (one.key.as_str(), "skipped"));
    let absent = plan.absent.iter().flat_map(|one| one.keys.iter().map(|key| (key.as_str(), "absent")));
    let applied = plan.applied().into_iter().map(|key| (key, "applied"));
    for (key, list) in refused.chain(skipped).chain(absent).chain(applied) {
        seen.entry(key).or_default().push(list);
    }
    for tensor in &file.tensors {
        let lists = seen.remove(tensor.key.as_str()).unwrap_or_default();
        assert_eq!(lists.len(), 1, "{:?} is in {lists:?}", tensor.key);
    }
    assert!(seen.is_empty(), "keys of no file: {seen:?}");
}

/// Nothing refused, absent or skipped.
pub(crate) fn check_applied(plan: &AdapterPlan) {
    assert!(
        plan.refused.is_empty() && plan.absent.is_empty() && plan.skipped.is_empty(),
        "{}",
        plan.report()
    );
    assert!(!plan.targets.is_empty());
}

/// The reasons of a plan's refusals, one a line.
pub(crate) fn reasons(plan: &AdapterPlan) -> String {
    let lines: Vec<_> = plan.refused.iter().map(|one| format!("{}: {}", one.key, one.reason)).collect();
    lines.join("\n")
}

/// A corpus file, whole.
pub(crate) struct Corpus {
    pub(crate) file: Checkpoint,
}

impl Corpus {
    pub(crate) fn open(path: &Path) -> Self {
        Self { file: Checkpoint::open(path, &OpenOptions::default()).unwrap() }
    }

    /// The numbers of a tensor in F32 or F64.
    pub(crate) fn numbers(&self, tensor: &TensorInfo) -> Vec<f64> {
        let mut bytes = vec![0; tensor.bytes() as usize];
        self.file.file_of(tensor).unwrap().read_exact_at(tensor.range.start, &mut bytes).unwrap();
        match tensor.kind.to_string().as_str() {
            "F32" => bytes.chunks(4).map(|b| f64::from(f32::from_le_bytes(b.try_into().unwrap()))).collect(),
            "F64" => bytes.chunks(8).map(|b| f64::from_le_bytes(b.try_into().unwrap())).collect(),
            other => panic!("{other}"),
        }
    }
}
