//! Low-rank changes of embeddings as PEFT writes them, both factors transposed: rank by rows, and columns by rank. A magnitude of
//! theirs is of the columns, and has one number for each.

use super::{
    Adapter, Cut, Made, Parts, Rule, Shape, matrix, mismatch, need, of_embedding, rank, refuse, take,
};
use crate::key::Role;
use crate::plan::AdapterKind;

pub(super) const ROLES: &[Role] = &[Role::EmbeddingA, Role::EmbeddingB];

pub(super) fn make<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    of_embedding(layer)?;
    let (a, b) = (need(parts, Role::EmbeddingA, "low-rank")?, need(parts, Role::EmbeddingB, "low-rank")?);
    let ((r, rows), (columns, own)) = (matrix(a)?, matrix(b)?);
    let r = rank(r)?;
    if own != r {
        return refuse(format!(
            "its factors do not belong together: {:?} is of rank {r} and {:?} of rank {own}",
            a.key, b.key
        ));
    }
    if rows != layer.rows() {
        return mismatch(a, &[r, layer.rows()], layer);
    }
    if columns != layer.columns() {
        return mismatch(b, &[layer.columns(), r], layer);
    }
    let magnitude = parts.get(&Role::Magnitude);
    if let Some(tensor) = magnitude {
        if tensor.key.contains("dora_scale") {
            return refuse(format!(
                "{:?} is a magnitude as LyCORIS spells it, which has none of embeddings, beside factors as PEFT spells them",
                tensor.key
            ));
        }
        if !matches!(tensor.shape[..], [n] | [1, n] if n == layer.columns()) {
            return mismatch(tensor, &[layer.columns()], layer);
        }
    }
    let cut = Cut::Never("it changes an embedding");
    let (parts, axis) = (take(parts, &[ROLES, &[Role::Magnitude]].concat()), magnitude.map(|_| 1));
    Ok(Adapter { rank: r, rule: Rule::OverRank, axis, ..Adapter::new(AdapterKind::Lora, parts, cut) })
}
