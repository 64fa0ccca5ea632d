//! What a low-rank product is multiplied by: alpha over rank, where alpha may be a tensor, a field of the header, or one of
//! `adapter_config.json`. What cannot be read or contradicts is ignored with a note, or refused; never used by half.

mod fields;

use std::collections::BTreeSet;

use fields::{Fields, Told, Tuning};

use crate::error::Result;
use crate::file::{AdapterFile, AdapterTensor};
use crate::key::Role;
use crate::kinds::{Adapter, Made, Rule, Shape, refuse};
use crate::names::Family;
use crate::plan::AdapterKind;

/// Terms of a series that are computed at most: more change nothing.
const MAX_TERMS: u64 = 64;
/// Terms that PEFT uses unless it is told otherwise.
const USUAL_TERMS: u32 = 5;
/// How small PEFT keeps constrained rotations unless it is told otherwise.
const USUAL_FREEDOM: f64 = 6e-5;

/// Whose scale is asked for.
pub(super) struct Owner<'a> {
    /// The layers.
    pub(super) names: Vec<&'a str>,
    /// Which of a pipeline's models the file's prefix named.
    pub(super) family: Option<Family>,
    /// Rows of the layer that the adapter was made for.
    pub(super) rows: u64,
}

/// What a file says about scales.
#[derive(Debug)]
pub(super) struct Scales {
    header: Fields,
    config: Fields,
    notes: BTreeSet<String>,
}

impl Rule {
    /// Whether an alpha of the file has a meaning for it.
    pub(super) fn uses_alpha(self) -> bool {
        !matches!(self, Self::None)
    }
}

impl Scales {
    pub(super) fn read(file: &AdapterFile) -> Result<Self> {
        let mut notes = BTreeSet::new();
        let header = Fields::of_header(file.metadata(), &mut notes);
        let config = file.config().map(|text| Fields::of_config(text, &mut notes)).transpose()?;
        Ok(Self { header, config: config.unwrap_or_default(), notes })
    }

    pub(super) fn into_notes(self) -> Vec<String> {
        self.notes.into_iter().collect()
    }

    /// Settles what the tensors of an adapter leave open and its configuration says.
    pub(super) fn settle(&mut self, adapter: &mut Adapter<'_>, owner: &Owner<'_>, shape: &Shape) -> Made<()> {
        let tuning = &self.config.tuning;
        if tuning.constrained {
            adapter.constraint = constraint(tuning, adapter, shape)?;
        }
        let has = |role| adapter.parts.contains_key(&role);
        if has(Role::PackedBlocks)
            && shape.kind.is_convolution()
            && self.config.kind.as_deref() != Some("OFT")
        {
            return refuse(
                "trainers that write rotations of a convolution's inputs so rotate them differently, and no adapter_config.json beside the \
                 file says that PEFT made it: put it there",
            );
        }
        if has(Role::PackedBlocks) || has(Role::EmbeddingBlocks) {
            adapter.series = match tuning.series {
                Some((false, _)) => None,
                Some((true, Some(terms @ 1..=MAX_TERMS))) => u32::try_from(terms).ok(),
                Some((true, terms)) => {
                    return refuse(format!(
                        "its configuration gives \"num_cayley_neumann_terms\" as {terms:?}, and 1 to {MAX_TERMS} are computed"
                    ));
                }
                None => {
                    self.notes.insert(format!(
                        "nothing beside the file says how its rotations are computed: as PEFT's are, with {USUAL_TERMS} terms of a series"
                    ));
                    Some(USUAL_TERMS)
                }
            };
        }
        if adapter.kind == AdapterKind::Ia3 && adapter.axis.is_none() {
            let Some(names) = &tuning.feedforward else {
                return refuse(
                    "its convolution has as many inputs as outputs, and \"feedforward_modules\" of adapter_config.json, which is not \
                     there, would tell which of them have factors",
                );
            };
            if let Some(pattern) =
                names.iter().find(|one| one.contains(['^', '$', '*', '+', '?', '(', '[', '{', '|', '\\']))
            {
                return refuse(format!(
                    "which of its convolution's inputs and outputs have factors depends on the pattern {pattern:?}, which is not read"
                ));
            }
            let is_one = |name: &&str| {
                names.iter().any(|one| {
                    name.strip_suffix(one.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
                })
            };
            adapter.axis = Some(u8::from(owner.names.iter().any(is_one)));
        }
        Ok(())
    }

    /// The scale of an adapter; of a rotation, the bound on its size.
    pub(super) fn scale(
        &mut self,
        adapter: &Adapter<'_>,
        alpha: Option<&AdapterTensor>,
        owner: &Owner<'_>,
        file: &AdapterFile,
    ) -> Made<f64> {
        let scale = self.any_scale(adapter, alpha, owner, file)?;
        // Layers multiply in that type.
        if adapter.rule == Rule::Bound || scale.abs() <= f64::from(f32::MAX) {
            Ok(scale)
        } else {
            refuse(format!("its scale is {scale:e}, which is too large for float32"))
        }
    }

    fn any_scale(
        &mut self,
        adapter: &Adapter<'_>,
        alpha: Option<&AdapterTensor>,
        owner: &Owner<'_>,
        file: &AdapterFile,
    ) -> Made<f64> {
        let value = alpha.map(|tensor| value(tensor, file)).transpose()?;
        let low_rank = adapter.kind == AdapterKind::Lora;
        let wants_dora = self.config.dora || self.header.dora_for(owner.family);
        if low_rank && wants_dora && !adapter.parts.contains_key(&Role::Magnitude) {
            return refuse("its configuration says that it is a DoRA adapter, and it has no magnitude");
        }
        match adapter.rule {
            Rule::None => Ok(1.0),
            Rule::Bound => match value.map_or(0.0, |value| value.max(0.0) * owner.rows as f64) {
                bound if bound.is_finite() => Ok(bound),
                bound => refuse(format!("its alpha bounds a rotation by {bound}")),
            },
            Rule::One if value.is_none() && self.config.kind.as_deref() == Some("LOKR") => {
                self.told(self.config.rank, owner)
            }
            Rule::One => {
                if value.is_some() {
                    self.notes.insert(
                        "the alpha of LoKr adapters whose factors are both whole is ignored: their scale is 1".into(),
                    );
                }
                Ok(1.0)
            }
            Rule::OverRank => match value {
                Some(value) => {
                    if value == 0.0 {
                        self.notes.insert(format!(
                            "alpha is 0 for {:?}: its adapter has no effect",
                            owner.names[0]
                        ));
                    }
                    Ok(value / adapter.rank as f64)
                }
                None => self.told(Some(adapter.rank as f64), owner),
            },
        }
    }

    /// The scale that header or configuration give where there is no tensor.
    fn told(&mut self, rank: Option<f64>, owner: &Owner<'_>) -> Made<f64> {
        let header = self.header.told(owner, rank, &mut self.notes)?;
        let config = self.config.told(owner, rank, &mut self.notes)?;
        let told = match (header, config) {
            (Some(a), Some(b)) if a != b => {
                self.notes.insert(format!(
                    "{} of the header gives alpha {} and {} of adapter_config.json gives {}: both are ignored, and the scale is 1",
                    a.field, a.alpha, b.field, b.alpha
                ));
                None
            }
            (a, b) => a.or(b),
        };
        Ok(told.map_or(1.0, |Told { alpha, root, .. }| {
            let rank = rank.filter(|rank| *rank > 0.0).unwrap_or(1.0);
            alpha / if root { rank.sqrt() } else { rank }
        }))
    }
}

/// How long the matrix of each block may be where PEFT constrains rotations; `None` for what it does not rotate.
fn constraint(tuning: &Tuning, adapter: &Adapter<'_>, shape: &Shape) -> Made<Option<f64>> {
    let packed = adapter.parts.get(&Role::PackedBlocks).or_else(|| adapter.parts.get(&Role::EmbeddingBlocks));
    let Some(tensor) = packed.or_else(|| adapter.parts.get(&Role::HalfBlocks)) else { return Ok(None) };
    let freedom = match &tuning.freedom {
        None => USUAL_FREEDOM,
        Some(Ok(freedom)) => *freedom,
        Some(Err(text)) => {
            return refuse(format!(
                "its configuration constrains its rotations (\"coft\") by {text} (\"eps\"), which is no number from 0 up"
            ));
        }
    };
    if adapter.kind == AdapterKind::BoftInputs {
        return refuse(
            "its configuration constrains its rotations (\"coft\"), which PEFT has not for butterflies",
        );
    }
    let blocks = tensor.shape.first().copied().unwrap_or(1).max(1) as f64;
    let before = if packed.is_some() {
        1.0
    } else {
        // Earlier versions took it times the square of the outputs of a block, also where inputs are in blocks.
        let turned = if adapter.kind == AdapterKind::Oft { shape.rows() } else { shape.columns() };
        let all = (turned / adapter.rank.max(1)).max(1);
        shape.rows().div_ceil(all) as f64
    };
    match freedom * before * before / blocks.sqrt() {
        bound if bound.is_finite() => Ok(Some(bound)),
        bound => refuse(format!("its configuration constrains its rotations (\"coft\") by {bound}")),
    }
}

/// The number in an alpha tensor.
fn value(tensor: &AdapterTensor, file: &AdapterFile) -> Made<f64> {
    if tensor.elements() != Some(1) {
        return refuse(format!("{:?} has the shape {:?} and should be one number", tensor.key, tensor.shape));
    }
    match file.scalar(&tensor.key) {
        None => refuse(format!("the value of {:?} could not be read", tensor.key)),
        Some(value) if value.is_finite() => Ok(value),
        Some(value) => refuse(format!("{:?} is {value}, which is no alpha", tensor.key)),
    }
}
