//! Low-rank changes of embeddings as PEFT writes them, both factors transposed: rank by rows, and columns by rank.

use super::{Adapter, Cut, Made, Parts, Rule, Shape, matrix, mismatch, need, rank, refuse, take};
use crate::key::Role;
use crate::layers::LayerKind;
use crate::plan::AdapterKind;

pub(super) const ROLES: &[Role] = &[Role::EmbeddingA, Role::EmbeddingB];

pub(super) fn make<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    if layer.kind != LayerKind::Embedding {
        return refuse(format!("it is for an embedding, and the layer is of the kind {}", layer.kind));
    }
    if parts.contains_key(&Role::Magnitude) {
        return refuse("it has a DoRA magnitude, which is not applied to embeddings");
    }
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
    let cut = Cut::Never("it changes an embedding");
    Ok(Adapter {
        kind: AdapterKind::Lora,
        parts: take(parts, ROLES),
        rank: r,
        rule: Rule::OverRank,
        axis: None,
        cut,
        series: None,
    })
}
