//! What an adapter file does to a model: for every key, the layer and part that takes it, or why none does.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use crate::key::Role;

/// The way an adapter changes its layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum AdapterKind {
    /// A product of two small matrices, with a core between them or without; with a magnitude it is `DoRA`.
    Lora,
    /// Two such products, multiplied element by element.
    Loha,
    /// A Kronecker product.
    Lokr,
    /// Rotations of blocks of outputs.
    Oft,
    /// Rotations of outputs in stages of a butterfly.
    Boft,
    /// Rotations of blocks of inputs.
    OftInputs,
    /// Rotations of inputs in stages of a butterfly.
    BoftInputs,
    /// Rotations of blocks of an embedding's vectors.
    OftVectors,
    /// Factors of inputs or of outputs.
    Ia3,
    /// A low-rank product, and a low-rank change of the inputs besides.
    Glora,
    /// The whole difference to a weight or a bare parameter.
    Diff,
    /// The whole difference to a bias.
    DiffBias,
}

impl AdapterKind {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lora => "lora",
            Self::Loha => "loha",
            Self::Lokr => "lokr",
            Self::Oft => "oft",
            Self::Boft => "boft",
            Self::OftInputs => "oft_inputs",
            Self::BoftInputs => "boft_inputs",
            Self::OftVectors => "oft_vectors",
            Self::Ia3 => "ia3",
            Self::Glora => "glora",
            Self::Diff => "diff",
            Self::DiffBias => "diff_bias",
        }
    }
}

impl AdapterKind {
    /// Whether it changes what the layer is given, so that it cannot be for some of its outputs alone.
    pub(crate) fn is_of_inputs(self) -> bool {
        matches!(self, Self::OftInputs | Self::BoftInputs | Self::Glora)
    }
}

impl fmt::Display for AdapterKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A tensor of the file that an adapter is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Its key.
    pub key: String,
    /// Its type, as safetensors spells it.
    pub dtype: String,
    /// Its shape in the file.
    pub shape: Vec<u64>,
    /// The rows of it that are used; `None` for all.
    pub rows: Option<Range<u64>>,
}

/// One adapter on one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterTarget {
    /// The layer, by the model's name.
    pub layer: String,
    /// The shape of the layer's whole weight, or of the parameter.
    pub shape: Vec<u64>,
    /// How it changes the layer.
    pub kind: AdapterKind,
    /// Its tensors.
    pub parts: BTreeMap<Role, Part>,
    /// The key its alpha came from, if that was a tensor.
    pub alpha: Option<String>,
    /// The rows of the layer's weight that it changes, where it was made for one part of a fused layer.
    pub rows: Option<Range<u64>>,
    /// The rows of its own product that the layer gets, where it was made for a fused layer and its parts cannot be cut.
    pub cut: Option<Range<u64>>,
    /// Its rank; 0 where it has none.
    pub rank: u64,
    /// What its product is multiplied by: alpha over rank. Of a rotation, the bound on its size, 0 for none.
    pub scale: f64,
    /// Of a magnitude, and of factors: 0 for one number a row, 1 for one a column.
    pub axis: Option<u8>,
    /// Terms of the series that stands for the inverse in the formula of a rotation of inputs; `None` for the inverse itself.
    pub series: Option<u32>,
    /// How long the matrix of each block may be before its rotation is computed; `None` for any length.
    pub constraint: Option<f64>,
    /// Whether its difference is laid out as columns by rows, as the layer keeps its weight.
    pub transposed: bool,
}

/// Keys whose layers the model does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Absent {
    /// A sentence about them.
    pub summary: String,
    /// The keys.
    pub keys: Vec<String>,
}

/// A key and why it is not applied.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refused {
    /// The key.
    pub key: String,
    /// Why.
    pub reason: String,
}

/// What a whole file does to a model. Each key of the file is in one of its lists.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AdapterPlan {
    /// What is applied, by layer.
    pub targets: Vec<AdapterTarget>,
    /// What speaks of layers that the model does not have.
    pub absent: Vec<Absent>,
    /// What cannot be applied. With any of these the file must not be applied at all.
    pub refused: Vec<Refused>,
    /// What was left out because it was made for a variant of the model, where that was allowed.
    pub skipped: Vec<Refused>,
    /// A sentence about a file that is no adapter at all but a model's own weights; all of its keys are refused or absent.
    pub checkpoint: Option<String>,
    /// What else there is to say, such as fields of the header that were ignored.
    pub notes: Vec<String>,
}

impl AdapterTarget {
    /// Every key that it uses, its alpha's too.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.parts.values().map(|part| part.key.as_str()).chain(self.alpha.as_deref())
    }
}

impl AdapterPlan {
    /// Every key that is applied, in order.
    pub fn applied(&self) -> Vec<&str> {
        let mut keys: Vec<_> = self.targets.iter().flat_map(AdapterTarget::keys).collect();
        keys.sort_unstable();
        keys.dedup();
        keys
    }

    /// A summary for people: what is applied, what is absent, what is refused.
    pub fn report(&self) -> String {
        let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
        for target in &self.targets {
            let dora = target.parts.contains_key(&Role::Magnitude) && target.kind == AdapterKind::Lora;
            *kinds.entry(if dora { "dora" } else { target.kind.name() }).or_default() += 1;
        }
        let kinds: Vec<_> = kinds.iter().map(|(kind, count)| format!("{count} {kind}")).collect();
        let kinds = if kinds.is_empty() { "nothing".to_owned() } else { kinds.join(", ") };
        if let Some(sentence) = &self.checkpoint {
            return sentence.clone();
        }
        let mut lines = vec![format!("applied: {} keys as {kinds}", self.applied().len())];
        let absent: usize = self.absent.iter().map(|absent| absent.keys.len()).sum();
        if absent > 0 {
            lines.push(format!("absent: {absent} keys"));
            lines.extend(self.absent.iter().map(|absent| format!("  {}", absent.summary)));
        }
        for (what, list) in [("skipped", &self.skipped), ("refused", &self.refused)] {
            if !list.is_empty() {
                lines.push(format!("{what}: {} keys", list.len()));
                lines.extend(list.iter().take(20).map(|one| format!("  {:?}: {}", one.key, one.reason)));
                lines.extend((list.len() > 20).then(|| format!("  and {} more", list.len() - 20)));
            }
        }
        lines.extend(self.notes.iter().map(|note| format!("note: {note}")));
        lines.join("\n")
    }
}
