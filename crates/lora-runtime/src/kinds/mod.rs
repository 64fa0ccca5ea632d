//! From the tensors of one layer to the adapters they make: which parts belong together, whether their shapes fit each other and
//! the layer, and what the scale is.

mod diff;
mod embedding;
mod factors;
mod inputs;
mod low_rank;
mod product;
mod rotation;

use std::collections::BTreeMap;

use crate::file::AdapterTensor;
use crate::key::Role;
use crate::layers::LayerKind;
use crate::plan::AdapterKind;

/// The largest rank that is believed.
pub(crate) const MAX_RANK: u64 = 1 << 14;
/// The largest block whose rotation is computed.
const MAX_BLOCK: u64 = 1 << 13;

pub(crate) use inputs::size_of_packed;

/// Why tensors make no adapter of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// They were made for another shape of the layer.
    Mismatch(String),
    /// They cannot be right for any layer.
    Refuse(String),
}

/// Either that or what was made.
pub(crate) type Made<T> = Result<T, Trouble>;

pub(crate) fn refuse<T>(why: impl Into<String>) -> Made<T> {
    Err(Trouble::Refuse(why.into()))
}

/// The layer that tensors were made for: one of the model, or what several of them would be together, or a part of one.
#[derive(Debug, Clone)]
pub(crate) struct Shape {
    pub(crate) kind: LayerKind,
    pub(crate) dims: Vec<u64>,
    pub(crate) bias: bool,
}

impl Shape {
    pub(crate) fn rows(&self) -> u64 {
        self.dims.first().copied().unwrap_or(1)
    }

    /// All dimensions but the first.
    pub(crate) fn inner(&self) -> &[u64] {
        self.dims.get(1..).unwrap_or(&[])
    }

    /// Elements of a row.
    pub(crate) fn columns(&self) -> u64 {
        self.inner().iter().fold(1, |all: u64, n| all.saturating_mul(*n))
    }

    /// Dimensions of the filter of a convolution.
    pub(crate) fn filter(&self) -> &[u64] {
        self.dims.get(2..).unwrap_or(&[])
    }
}

/// The tensors of one layer, by role.
pub(crate) type Parts<'a> = BTreeMap<Role, &'a AdapterTensor>;

/// How rows of what an adapter makes can be taken alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cut {
    /// By taking rows of these parts, and all of the others.
    Parts(&'static [Role]),
    /// By computing the whole product and taking its rows.
    Product,
    /// Not at all.
    Never(&'static str),
}

/// An adapter, before it is known where its alpha comes from.
#[derive(Debug)]
pub(crate) struct Adapter<'a> {
    pub(crate) kind: AdapterKind,
    pub(crate) parts: Parts<'a>,
    pub(crate) rank: u64,
    pub(crate) rule: Rule,
    pub(crate) axis: Option<u8>,
    pub(crate) cut: Cut,
    /// Terms of a series, where one is used.
    pub(crate) series: Option<u32>,
    /// How long each block's matrix may be, where a configuration constrains rotations.
    pub(crate) constraint: Option<f64>,
}

impl<'a> Adapter<'a> {
    /// One with neither rank, scale nor axis, and nothing that a configuration says.
    fn new(kind: AdapterKind, parts: Parts<'a>, cut: Cut) -> Self {
        Self { kind, parts, rank: 0, rule: Rule::None, axis: None, cut, series: None, constraint: None }
    }

    /// Whether it changes what the layer is given, so that it cannot be for some of its outputs alone.
    pub(crate) fn changes_inputs(&self) -> bool {
        self.kind.is_of_inputs() || self.kind == AdapterKind::Ia3 && self.axis == Some(1)
    }
}

/// How alpha becomes a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rule {
    /// Alpha over rank; 1 without alpha.
    OverRank,
    /// 1, whatever alpha holds, except where PEFT made the file.
    One,
    /// Alpha times the outputs bounds the size of a rotation.
    Bound,
    /// There is none.
    None,
}

/// Makes one kind of adapter of its parts.
type Make<'a> = fn(&Parts<'a>, &Shape) -> Made<Adapter<'a>>;

/// Makes what can be made of the tensors of a layer: one adapter of its weight at most, and a difference to its bias.
pub(crate) fn make<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Vec<Adapter<'a>>> {
    // Where inputs are changed by a low-rank product, the plain one belongs to it.
    let plain = !parts.contains_key(&Role::InputUp) && !parts.contains_key(&Role::InputDown);
    let families: [(&[Role], Make<'a>); 8] = [
        (
            if plain { low_rank::ROLES } else { inputs::LOW_RANK },
            if plain { low_rank::make } else { inputs::low_rank },
        ),
        (embedding::ROLES, embedding::make),
        (inputs::VECTORS, inputs::vectors),
        (inputs::ROTATIONS, inputs::rotations),
        (factors::ROLES, factors::make),
        (product::HADAMARD, product::hadamard),
        (product::KRONECKER, product::kronecker),
        (rotation::ROLES, rotation::make),
    ];
    let mut found = Vec::new();
    let present = |roles: &[Role]| roles.iter().any(|role| parts.contains_key(role));
    let kinds = families.iter().filter(|(roles, _)| present(roles)).count();
    if kinds > 1 {
        return refuse("it has parts of adapters of several kinds");
    }
    for (roles, make) in families {
        if present(roles) {
            let of_embeddings =
                roles == embedding::ROLES || roles == inputs::VECTORS || roles == low_rank::ROLES;
            let fits = layer.kind.is_product() || layer.kind == LayerKind::Embedding && of_embeddings;
            if !fits {
                return refuse(format!(
                    "a layer of the kind {} takes {} only",
                    layer.kind,
                    if layer.kind == LayerKind::Embedding {
                        "low-rank adapters, rotations of its vectors and whole differences"
                    } else {
                        "whole differences"
                    }
                ));
            }
            found.push(make(parts, layer)?);
        }
    }
    let decomposed = parts.contains_key(&Role::Magnitude);
    if decomposed && kinds == 0 {
        return refuse("it is the magnitude of a DoRA adapter without its factors");
    }
    if parts.contains_key(&Role::DiffModulation) && layer.kind != LayerKind::Parameter {
        return refuse(format!(
            "it changes the modulation of a block, which is a layer of the kind {} here",
            layer.kind
        ));
    }
    if parts.contains_key(&Role::DiffModulation) && parts.contains_key(&Role::Diff) {
        return refuse("the whole difference of the parameter is there twice");
    }
    if let Some(diff) = parts.get(&Role::Diff).or_else(|| parts.get(&Role::DiffModulation)) {
        if decomposed {
            return refuse(
                "the layer has both a DoRA magnitude and a whole difference, of which the order is not said",
            );
        }
        found.push(diff::weight(diff, layer)?);
    }
    if let Some(diff) = parts.get(&Role::DiffBias) {
        found.push(diff::bias(diff, layer)?);
    }
    if found.is_empty() {
        return refuse("it is an alpha without an adapter");
    }
    Ok(found)
}

/// A part that must be there.
pub(crate) fn need<'a>(parts: &Parts<'a>, role: Role, kind: &str) -> Made<&'a AdapterTensor> {
    parts
        .get(&role)
        .copied()
        .ok_or_else(|| Trouble::Refuse(format!("its {kind} adapter has no part {:?}", role.name())))
}

/// The parts of some roles.
pub(crate) fn take<'a>(parts: &Parts<'a>, roles: &[Role]) -> Parts<'a> {
    roles.iter().filter_map(|role| Some((*role, *parts.get(role)?))).collect()
}

/// A shape less the dimensions of 1 behind its first two.
pub(crate) fn matrix(tensor: &AdapterTensor) -> Made<(u64, u64)> {
    match tensor.shape[..] {
        [rows, columns] => Ok((rows, columns)),
        [rows, columns, ref rest @ ..] if rest.iter().all(|n| *n == 1) => Ok((rows, columns)),
        _ => refuse(format!("{:?} has the shape {:?} and should be a matrix", tensor.key, tensor.shape)),
    }
}

/// A rank that can be believed.
pub(crate) fn rank(rank: u64) -> Made<u64> {
    match rank {
        0 => refuse("its rank is 0"),
        1..=MAX_RANK => Ok(rank),
        _ => refuse(format!("its rank is {rank}, above {MAX_RANK}")),
    }
}

/// The refusal of a shape.
pub(crate) fn mismatch<T>(tensor: &AdapterTensor, wanted: &[u64], layer: &Shape) -> Made<T> {
    Err(Trouble::Mismatch(format!(
        "{:?} has the shape {:?}, and {wanted:?} fits the {} layer of {:?}",
        tensor.key, tensor.shape, layer.kind, layer.dims
    )))
}

/// The axis of a magnitude, by its shape alone.
pub(crate) fn magnitude_axis(parts: &Parts<'_>, layer: &Shape) -> Made<Option<u8>> {
    let Some(tensor) = parts.get(&Role::Magnitude) else { return Ok(None) };
    let (rows, columns) = (layer.rows(), layer.dims.get(1).copied().unwrap_or(1));
    let ones = |rest: &[u64]| rest.iter().all(|n| *n == 1);
    // PEFT keeps one number a filter of a convolution behind a dimension of 1, where others have one a channel.
    let behind = layer.kind.is_convolution() && !tensor.key.contains("dora_scale");
    let axis = match &tensor.shape[..] {
        [n] if *n == rows => Some(0),
        [n, rest @ ..] if *n == rows && ones(rest) => Some(0),
        [1, n, rest @ ..] if behind && *n == rows && ones(rest) => Some(0),
        [1, n, rest @ ..] if *n == columns && ones(rest) => Some(1),
        [n] if *n == columns => Some(1),
        _ => None,
    };
    match axis {
        Some(axis) => Ok(Some(axis)),
        None => mismatch(tensor, &[rows, 1], layer),
    }
}

/// Whether there is no `DoRA` magnitude, which does not go with what else `it` says of the adapter.
fn no_magnitude(parts: &Parts<'_>, it: &str) -> Made<()> {
    if parts.contains_key(&Role::Magnitude) {
        return refuse(format!("it {it} a DoRA magnitude, which do not go together"));
    }
    Ok(())
}

/// Whether the layer is an embedding, as what is written for one needs.
fn of_embedding(layer: &Shape) -> Made<()> {
    if layer.kind != LayerKind::Embedding {
        return refuse(format!("it is for an embedding, and the layer is of the kind {}", layer.kind));
    }
    Ok(())
}

/// Whether a butterfly has this many stages: each pairs halves of blocks that lie twice as far apart.
fn butterfly(stages: u64, blocks: u64, size: u64) -> Made<()> {
    if !size.is_multiple_of(2) {
        return refuse(format!("blocks of {size} rows cannot be halved for a butterfly"));
    }
    let last = stages.checked_sub(1).filter(|last| *last < 63);
    match last {
        Some(last) if blocks.is_multiple_of(1 << last) => Ok(()),
        _ => refuse(format!("a butterfly of {stages} stages has no {blocks} blocks")),
    }
}
