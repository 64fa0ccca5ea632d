//! A model as adapters see it: its layers by name, kind and weight shape, and the ways in which a file may spell their names.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::str::FromStr;

use crate::error::{LoraError, Result};
use crate::names::{flatten, unwrapped};

/// The most layers a model may have.
const MAX_LAYERS: usize = 1 << 20;

/// What a layer does with its weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerKind {
    /// A matrix product; the weight is rows of outputs, columns of inputs.
    Linear,
    /// A matrix product whose weight is kept as columns by rows, as the `Conv1D` of transformers does. Its shape is given as that
    /// of any linear layer: outputs by inputs.
    LinearTransposed,
    /// A convolution in one dimension.
    Conv1d,
    /// In two.
    Conv2d,
    /// In three.
    Conv3d,
    /// A normalization with a weight.
    Norm,
    /// A table of vectors.
    Embedding,
    /// A bare parameter that no layer owns, named itself.
    Parameter,
    /// Any other module with a weight.
    Other,
}

impl LayerKind {
    const NAMES: [(Self, &'static str); 9] = [
        (Self::Linear, "linear"),
        (Self::LinearTransposed, "linear_transposed"),
        (Self::Conv1d, "conv1d"),
        (Self::Conv2d, "conv2d"),
        (Self::Conv3d, "conv3d"),
        (Self::Norm, "norm"),
        (Self::Embedding, "embedding"),
        (Self::Parameter, "parameter"),
        (Self::Other, "other"),
    ];

    /// Whether it is a product of inputs with a weight, so that low-rank adapters have a meaning.
    pub fn is_product(self) -> bool {
        matches!(self, Self::Linear | Self::LinearTransposed) || self.is_convolution()
    }

    /// Whether it is a convolution.
    pub fn is_convolution(self) -> bool {
        matches!(self, Self::Conv1d | Self::Conv2d | Self::Conv3d)
    }
}

impl fmt::Display for LayerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::NAMES.iter().find(|(kind, _)| kind == self).map_or("other", |(_, name)| name))
    }
}

impl FromStr for LayerKind {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::NAMES.iter().find(|(_, name)| *name == text).map(|(kind, _)| *kind).ok_or(())
    }
}

/// A layer of the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Its path in the model.
    pub name: String,
    /// What it does.
    pub kind: LayerKind,
    /// The shape of its weight, slowest dimension first; of a bare parameter, its own.
    pub shape: Vec<u64>,
    /// Whether it has a bias.
    pub bias: bool,
}

impl Layer {
    /// A layer whose kind is given by name.
    pub fn parse(name: &str, kind: &str, shape: Vec<u64>, bias: bool) -> Result<Self> {
        let kind = kind.parse().map_err(|()| LoraError::LayerKind {
            name: name.into(),
            kind: kind.into(),
            known: LayerKind::NAMES.map(|(_, name)| name).join(", "),
        })?;
        Ok(Self { name: name.into(), kind, shape, bias })
    }

    /// Rows of the weight: its outputs.
    pub fn rows(&self) -> u64 {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Elements of the weight; `None` if no memory could hold them.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1_u64, |all, n| all.checked_mul(*n))
    }
}

/// What a name may stand for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    /// One layer, by its number.
    One(usize),
    /// Several.
    Many(Vec<usize>),
}

/// All layers of a model.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    all: Vec<Layer>,
    exact: HashMap<String, usize>,
    flat: HashMap<String, Vec<usize>>,
    /// Names less what wraps the model, for files that do not have the wrapper.
    inner: HashMap<String, Vec<usize>>,
    /// Every module that a layer lies in, flattened.
    parents: HashSet<String>,
}

impl Layers {
    /// The layers of a model, in any order.
    pub fn new(layers: impl IntoIterator<Item = Layer>) -> Result<Self> {
        let mut all: Self = Self::default();
        for layer in layers {
            let number = all.all.len();
            if number == MAX_LAYERS {
                return Err(LoraError::TooMany { what: "layers", have: number + 1, limit: MAX_LAYERS });
            }
            if all.exact.insert(layer.name.clone(), number).is_some() {
                return Err(LoraError::DuplicateLayer { name: layer.name });
            }
            let flat = flatten(&layer.name);
            for (at, _) in flat.match_indices('_') {
                all.parents.insert(flat[..at].to_owned());
            }
            for inner in unwrapped(&layer.name) {
                all.inner.entry(flatten(inner)).or_default().push(number);
            }
            all.flat.entry(flat).or_default().push(number);
            all.all.push(layer);
        }
        Ok(all)
    }

    /// All layers.
    pub fn iter(&self) -> impl Iterator<Item = &Layer> {
        self.all.iter()
    }

    pub(crate) fn get(&self, number: usize) -> &Layer {
        &self.all[number]
    }

    /// The layer of exactly this name.
    pub(crate) fn exact(&self, name: &str) -> Option<usize> {
        self.exact.get(name).copied()
    }

    /// The layer whose name has these letters and digits.
    pub(crate) fn flat(&self, flat: &str) -> Option<Found> {
        self.flat.get(flat).map(|numbers| found(numbers))
    }

    /// The layer whose name, less what wraps the model, has these letters and digits.
    pub(crate) fn inner(&self, flat: &str) -> Option<Found> {
        self.inner.get(flat).map(|numbers| found(numbers))
    }

    /// Whether some layer lies in a module whose name has these letters and digits.
    pub(crate) fn has_parent(&self, flat: &str) -> bool {
        self.parents.contains(flat)
    }
}

fn found(numbers: &[usize]) -> Found {
    match numbers {
        [one] => Found::One(*one),
        many => Found::Many(many.to_vec()),
    }
}
