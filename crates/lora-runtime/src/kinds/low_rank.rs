//! `LoRA`: two factors, for convolutions with a core between them, and `DoRA`, which adds a magnitude.

use super::{
    Adapter, Cut, Made, Parts, Rule, Shape, magnitude_axis, matrix, mismatch, need, rank, refuse, take,
};
use crate::file::AdapterTensor;
use crate::key::Role;
use crate::layers::LayerKind;
use crate::plan::AdapterKind;

pub(super) const ROLES: &[Role] = &[Role::Down, Role::Up, Role::Mid, Role::UpBias];

pub(super) fn make<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    let down = need(parts, Role::Down, "low-rank")?;
    let up = need(parts, Role::Up, "low-rank")?;
    let mid = parts.get(&Role::Mid).copied();
    let more = [Role::Mid, Role::UpBias, Role::Magnitude];
    if let Some(role) =
        more.iter().find(|role| layer.kind == LayerKind::Embedding && parts.contains_key(role))
    {
        return refuse(format!("it has a part {:?}, which adapters of embeddings do not have", role.name()));
    }
    let (up_rows, r) = matrix(up)?;
    let r = rank(r)?;
    if down.shape.first() != Some(&r) {
        return refuse(format!(
            "its factors do not belong together: {:?} is of rank {} and {:?} of rank {r}",
            down.key,
            down.shape.first().copied().unwrap_or(0),
            up.key
        ));
    }
    if up_rows != layer.rows() {
        return mismatch(up, &[layer.rows(), r], layer);
    }
    match mid {
        Some(mid) => core(mid, down, r, layer)?,
        None => inputs(down, r, layer)?,
    }
    if let Some(bias) = parts.get(&Role::UpBias)
        && bias.shape[..] != [layer.rows()]
    {
        return mismatch(bias, &[layer.rows()], layer);
    }
    let axis = magnitude_axis(parts, layer)?;
    let cut = match axis {
        None | Some(0) => Cut::Parts(&[Role::Up, Role::UpBias, Role::Magnitude]),
        Some(_) => Cut::Never(
            "its DoRA magnitude has one number a column, for the lengths of the fused layer's columns",
        ),
    };
    let roles = [ROLES, &[Role::Magnitude]].concat();
    let parts = take(parts, &roles);
    Ok(Adapter { rank: r, rule: Rule::OverRank, axis, ..Adapter::new(AdapterKind::Lora, parts, cut) })
}

/// The lower factor without a core: rank, then what a row of the weight is.
fn inputs(down: &AdapterTensor, r: u64, layer: &Shape) -> Made<()> {
    let wanted = [&[r], layer.inner()].concat();
    let squeezed = |shape: &[u64]| {
        let ones = shape.iter().rev().take_while(|n| **n == 1).count().min(shape.len().saturating_sub(2));
        shape[..shape.len() - ones].to_vec()
    };
    if squeezed(&down.shape) == squeezed(&wanted) { Ok(()) } else { mismatch(down, &wanted, layer) }
}

/// The core of a convolution, whose lower factor then has no filter.
fn core(mid: &AdapterTensor, down: &AdapterTensor, r: u64, layer: &Shape) -> Made<()> {
    if !layer.kind.is_convolution() {
        return refuse(format!("it has a core, {:?}, which only adapters of convolutions have", mid.key));
    }
    let wanted = [&[r, r], layer.filter()].concat();
    if mid.shape != wanted {
        return mismatch(mid, &wanted, layer);
    }
    let channels = layer.dims.get(1).copied().unwrap_or(1);
    if matrix(down)? == (r, channels) { Ok(()) } else { mismatch(down, &[r, channels], layer) }
}
