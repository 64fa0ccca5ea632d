//! The tensors of one layer of a file, gathered from all of their spellings, and the targets they become.

use std::collections::BTreeMap;
use std::ops::Range;

use super::kin::{Share, sizes};
use super::place::{Piece, Place};
use super::scale::{Owner, Scales};
use crate::file::{AdapterFile, AdapterTensor};
use crate::key::{AdapterKey, Role};
use crate::kinds::{self, Adapter, Cut, Made, Parts, Trouble, refuse};
use crate::layers::{LayerKind, Layers};
use crate::names::Family;
use crate::plan::{AdapterKind, AdapterPlan, AdapterTarget, Part, Refused};

/// The tensors of one layer.
#[derive(Debug, Default)]
struct Group<'a> {
    tensors: BTreeMap<Role, Vec<&'a AdapterTensor>>,
    family: Option<Family>,
}

/// A fused layer, and how many parts it is taken to have.
type Fused = (usize, usize);

/// All layers that a file speaks of, by their places.
#[derive(Debug, Default)]
pub(super) struct Groups<'a> {
    groups: BTreeMap<Place, Group<'a>>,
}

impl<'a> Groups<'a> {
    pub(super) fn add(
        &mut self,
        place: &Place,
        family: Option<Family>,
        key: AdapterKey<'a>,
        tensor: &'a AdapterTensor,
    ) {
        let group = self.groups.entry(place.clone()).or_default();
        group.tensors.entry(key.role).or_default().push(tensor);
        group.family = group.family.or(family);
    }

    /// Makes targets of all layers, or says of all of a layer's keys why not.
    pub(super) fn resolve(
        self,
        layers: &Layers,
        file: &AdapterFile,
        scales: &mut Scales,
        ignore_variations: bool,
        plan: &mut AdapterPlan,
    ) {
        let within = self.parts_of_layers(layers);
        for (place, group) in &self.groups {
            let rows = match place {
                Place::Within { layer, number, count, .. } => {
                    within.get(&(*layer, *count)).and_then(|all| all.get(*number).cloned())
                }
                _ => None,
            };
            match group.targets(layers, place, rows, file, scales) {
                Ok((targets, unused)) => {
                    plan.targets.extend(targets);
                    plan.skipped.extend(unused);
                }
                Err(Trouble::Mismatch(reason)) if ignore_variations => {
                    plan.skipped.extend(group.all(&reason));
                }
                Err(Trouble::Mismatch(reason) | Trouble::Refuse(reason)) => {
                    plan.refused.extend(group.all(&reason));
                }
            }
        }
    }

    /// Which rows the parts of fused layers are, from all parts of each that the file has.
    fn parts_of_layers(&self, layers: &Layers) -> BTreeMap<Fused, Vec<Range<u64>>> {
        let mut known: BTreeMap<Fused, (Vec<Option<u64>>, Share)> = BTreeMap::new();
        for (place, group) in &self.groups {
            let Place::Within { layer, number, count, sizes, share } = place else { continue };
            let entry = known.entry((*layer, *count)).or_insert_with(|| (vec![None; *count], *share));
            match sizes {
                Some(sizes) => entry.0 = sizes.iter().copied().map(Some).collect(),
                None => {
                    if let Some(slot) = entry.0.get_mut(*number) {
                        *slot = group.rows();
                    }
                }
            }
        }
        let ranges = known.into_iter().filter_map(|(key, (known, share))| {
            let mut end = 0;
            let sizes = sizes(share, &known, layers.get(key.0).rows())?;
            let ranges = sizes.into_iter().map(|size| {
                end += size;
                end - size..end
            });
            Some((key, ranges.collect()))
        });
        ranges.collect()
    }
}

impl Group<'_> {
    /// The rows that its own tensors are for.
    fn rows(&self) -> Option<u64> {
        let first = |role: Role| Some(*self.tensors.get(&role)?.first()?.shape.first()?);
        let either = |a: Role, b: Role| first(a).or_else(|| first(b));
        let kronecker = || either(Role::W1, Role::W1A)?.checked_mul(either(Role::W2, Role::W2A)?);
        let blocks = || {
            let shape = &self.tensors.get(&Role::Blocks)?.first()?.shape;
            let [.., n, size, _] = shape[..] else { return None };
            n.checked_mul(size)
        };
        let factors = || {
            let shape = &self.tensors.get(&Role::Scales)?.first()?.shape;
            shape.first().copied().filter(|n| *n != 1)
        };
        first(Role::Up)
            .or_else(|| first(Role::HadaW1A))
            .or_else(kronecker)
            .or_else(|| either(Role::Diff, Role::DiffBias))
            .or_else(blocks)
            .or_else(factors)
    }

    /// Every key, with a reason.
    fn all(&self, reason: &str) -> Vec<Refused> {
        let tensors = self.tensors.values().flatten();
        tensors.map(|tensor| Refused { key: tensor.key.clone(), reason: reason.into() }).collect()
    }

    /// The targets, and an alpha that means nothing to them.
    fn targets(
        &self,
        layers: &Layers,
        place: &Place,
        within: Option<Range<u64>>,
        file: &AdapterFile,
        scales: &mut Scales,
    ) -> Made<(Vec<AdapterTarget>, Option<Refused>)> {
        let mut parts = Parts::new();
        for (role, tensors) in &self.tensors {
            match tensors[..] {
                [one] => {
                    parts.insert(*role, one);
                }
                [a, b, ..] => {
                    return refuse(format!("{:?} and {:?} are the same part of one layer", a.key, b.key));
                }
                [] => {}
            }
        }
        if let Some(bad) = parts.values().find(|tensor| tensor.elements().is_none_or(|n| n == 0)) {
            return refuse(format!("{:?} has the shape {:?}, which holds no numbers", bad.key, bad.shape));
        }
        let (shape, pieces) = place.pieces(layers, within)?;
        let alpha = parts.remove(&Role::Alpha);
        let made = kinds::make(&parts, &shape)?;
        let mut targets = Vec::new();
        let mut alpha_used = false;
        for mut adapter in made {
            let owner = Owner {
                names: pieces.iter().map(|piece| layers.get(piece.layer).name.as_str()).collect(),
                family: self.family,
                rows: shape.rows(),
            };
            scales.settle(&mut adapter, &owner, &shape)?;
            if adapter.changes_inputs() && pieces.iter().any(|piece| piece.to.is_some()) {
                return refuse(
                    "it changes the inputs of one part of a fused layer, whose other parts are given the same ones",
                );
            }
            let scale = scales.scale(&adapter, alpha, &owner, file)?;
            let alpha = alpha.filter(|_| adapter.rule.uses_alpha());
            alpha_used |= alpha.is_some();
            for piece in &pieces {
                let mut target = target(layers, &adapter, piece, shape.rows())?;
                target.scale = scale;
                target.alpha = alpha.map(|tensor| tensor.key.clone());
                targets.push(target);
            }
        }
        let unused = alpha.filter(|_| !alpha_used).map(|alpha| Refused {
            key: alpha.key.clone(),
            reason: "a whole difference has no alpha".into(),
        });
        Ok((targets, unused))
    }
}

/// An adapter on a piece of a layer.
fn target(layers: &Layers, adapter: &Adapter<'_>, piece: &Piece, rows: u64) -> Made<AdapterTarget> {
    let layer = layers.get(piece.layer);
    let (mut cut, mut roles): (_, &[Role]) = (None, &[]);
    if let Some(from) = &piece.from {
        match adapter.cut {
            Cut::Parts(these) => roles = these,
            Cut::Product => (cut, roles) = (Some(from.clone()), &[Role::Magnitude]),
            Cut::Never(why) => return refuse(format!("it cannot be shared between parts of a layer: {why}")),
        }
    }
    for role in roles {
        if let Some(tensor) = adapter.parts.get(role).filter(|tensor| tensor.shape.first() != Some(&rows)) {
            return refuse(format!("{:?} of {:?} cannot be cut into {rows} rows", tensor.key, tensor.shape));
        }
    }
    let parts = adapter.parts.iter().map(|(role, tensor)| {
        let rows = piece.from.clone().filter(|_| roles.contains(role));
        let part =
            Part { key: tensor.key.clone(), dtype: tensor.dtype.clone(), shape: tensor.shape.clone(), rows };
        (*role, part)
    });
    Ok(AdapterTarget {
        layer: layer.name.clone(),
        shape: layer.shape.clone(),
        kind: adapter.kind,
        parts: parts.collect(),
        alpha: None,
        rows: piece.to.clone(),
        cut,
        rank: adapter.rank,
        scale: 1.0,
        axis: adapter.axis,
        series: adapter.series,
        constraint: adapter.constraint,
        transposed: layer.kind == LayerKind::LinearTransposed && adapter.kind == AdapterKind::Diff,
    })
}
