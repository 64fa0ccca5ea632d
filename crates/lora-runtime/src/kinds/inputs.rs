//! What changes a layer's inputs: PEFT's rotations, in blocks or in the stages of a butterfly, and the low-rank change of `GLoRA`.
//! Beside them PEFT's rotations of an embedding's vectors, which are written alike.

use super::{
    Adapter, Cut, MAX_BLOCK, Made, Parts, Rule, Shape, butterfly, matrix, mismatch, no_magnitude,
    of_embedding, refuse, take,
};
use super::{low_rank as plain, need};
use crate::file::AdapterTensor;
use crate::key::Role;
use crate::layers::LayerKind;
use crate::plan::AdapterKind;

pub(super) const ROTATIONS: &[Role] = &[Role::PackedBlocks, Role::HalfBlocks, Role::Gain];
pub(super) const VECTORS: &[Role] = &[Role::EmbeddingBlocks];
pub(super) const LOW_RANK: &[Role] =
    &[Role::Down, Role::Up, Role::Mid, Role::UpBias, Role::InputUp, Role::InputDown];

pub(super) fn rotations<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    no_magnitude(parts, "has a rotation and")?;
    let (kind, tensor, blocks, size) = match (parts.get(&Role::PackedBlocks), parts.get(&Role::HalfBlocks)) {
        (Some(_), Some(_)) => return refuse("its rotations are there twice, packed and as matrices"),
        (Some(packed), None) => {
            let (blocks, size) = unpacked(packed)?;
            (AdapterKind::OftInputs, *packed, blocks, size)
        }
        (None, half) => {
            let half = half.copied().map_or_else(|| need(parts, Role::HalfBlocks, "OFT"), Ok)?;
            match half.shape[..] {
                // The first of them had no gain, and rotated outputs.
                [n, a, b] if a == b && !parts.contains_key(&Role::Gain) => (AdapterKind::Oft, half, n, a),
                [n, a, b] if a == b => (AdapterKind::OftInputs, half, n, a),
                [stages, n, a, b] if a == b => {
                    if stages != 1 {
                        butterfly(stages, n, a)?;
                    }
                    (AdapterKind::BoftInputs, half, n, a)
                }
                _ => return no_blocks(half),
            }
        }
    };
    sized(tensor, size)?;
    let turned = if kind == AdapterKind::Oft { layer.rows() } else { layer.columns() };
    // One block may stand for all of them.
    let shared = blocks == 1 && turned.is_multiple_of(size) && kind != AdapterKind::BoftInputs;
    if blocks.checked_mul(size) != Some(turned) && !shared {
        let mut wanted = tensor.shape.clone();
        let at = usize::from(tensor.shape.len() == 4);
        if let Some(blocks) = wanted.get_mut(at) {
            *blocks = turned / size;
        }
        return mismatch(tensor, &wanted, layer);
    }
    if kind != AdapterKind::Oft && layer.filter().iter().any(|n| *n != 1) {
        if layer.kind != LayerKind::Conv2d || layer.filter()[0] != layer.filter()[1] {
            return refuse(format!(
                "it rotates the inputs of a filter of {:?}, and PEFT has that of square filters in two dimensions alone",
                layer.filter()
            ));
        }
        if parts.contains_key(&Role::PackedBlocks) {
            return refuse(
                "it rotates patches of a convolution's inputs, which PEFT puts back elsewhere than it took them from, and merges a filter \
                 that gives something else: nobody can say which of both was meant",
            );
        }
    }
    if let Some(gain) = parts.get(&Role::Gain)
        && (gain.elements() != Some(layer.rows()) || !gain.shape.contains(&layer.rows()))
    {
        return mismatch(gain, &[layer.rows(), 1], layer);
    }
    let cut = match kind {
        AdapterKind::Oft => Cut::Never("it rotates the outputs of the fused layer together"),
        _ if parts.get(&Role::Gain).is_some_and(|gain| gain.shape.first() != Some(&layer.rows())) => {
            Cut::Never("its gains are not one a row")
        }
        _ => Cut::Parts(&[Role::Gain]),
    };
    let rule = if kind == AdapterKind::Oft { Rule::Bound } else { Rule::None };
    Ok(Adapter { rank: size, rule, ..Adapter::new(kind, take(parts, ROTATIONS), cut) })
}

/// Rotations of blocks of an embedding's vectors.
pub(super) fn vectors<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    of_embedding(layer)?;
    no_magnitude(parts, "has a rotation and")?;
    let tensor = need(parts, Role::EmbeddingBlocks, "OFT")?;
    let (blocks, size) = unpacked(tensor)?;
    sized(tensor, size)?;
    let columns = layer.columns();
    // One block may stand for all of them.
    if blocks.checked_mul(size) != Some(columns) && !(blocks == 1 && columns.is_multiple_of(size)) {
        return mismatch(tensor, &[columns / size, size * (size - 1) / 2], layer);
    }
    let cut = Cut::Never("it changes an embedding");
    Ok(Adapter { rank: size, ..Adapter::new(AdapterKind::OftVectors, take(parts, VECTORS), cut) })
}

/// How many blocks a tensor of packed ones holds, and the rows of each.
fn unpacked(tensor: &AdapterTensor) -> Made<(u64, u64)> {
    match tensor.shape[..] {
        [blocks, numbers] => {
            size_of_packed(numbers).map_or_else(|| no_blocks(tensor), |size| Ok((blocks, size)))
        }
        _ => no_blocks(tensor),
    }
}

fn sized(tensor: &AdapterTensor, size: u64) -> Made<()> {
    if (1..=MAX_BLOCK).contains(&size) {
        return Ok(());
    }
    refuse(format!("the blocks of {:?} are of {size} rows; 1 to {MAX_BLOCK} are rotated", tensor.key))
}

/// Rows of an antisymmetric matrix with so many numbers above its diagonal.
pub(crate) fn size_of_packed(numbers: u64) -> Option<u64> {
    let root = numbers.checked_mul(8)?.checked_add(1)?.isqrt();
    let size = root.checked_add(1)? / 2;
    (size.checked_mul(size.checked_sub(1)?)? / 2 == numbers).then_some(size)
}

fn no_blocks<T>(tensor: &AdapterTensor) -> Made<T> {
    refuse(format!("{:?} has the shape {:?}, which is none of rotations", tensor.key, tensor.shape))
}

/// A low-rank product, and a low-rank change of the inputs.
pub(super) fn low_rank<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    no_magnitude(parts, "is GLoRA with")?;
    let made = plain::make(parts, layer)?;
    let (up, down) = (need(parts, Role::InputUp, "GLoRA")?, need(parts, Role::InputDown, "GLoRA")?);
    let channels = layer.dims.get(1).copied().unwrap_or(1);
    for (tensor, own, wanted) in
        [(up, matrix(up)?, [channels, made.rank]), (down, matrix(down)?, [made.rank, channels])]
    {
        if own != (wanted[0], wanted[1]) {
            return mismatch(tensor, &wanted, layer);
        }
    }
    let parts = take(parts, LOW_RANK);
    Ok(Adapter { kind: AdapterKind::Glora, parts, ..made })
}

#[cfg(test)]
mod tests {
    use super::size_of_packed;

    #[test]
    fn the_numbers_above_a_diagonal_tell_its_length() {
        let known: Vec<_> = (2_u64..=100).map(|size| (size * (size - 1) / 2, size)).collect();
        for numbers in 1..=4950 {
            let size = known.iter().find(|(n, _)| *n == numbers).map(|(_, size)| *size);
            assert_eq!(size_of_packed(numbers), size, "{numbers}");
        }
        for huge in [u64::MAX, u64::MAX / 8, u64::MAX / 8 + 1, 1 << 60] {
            assert!(size_of_packed(huge).is_none_or(|size| size > 1 << 20), "{huge}");
        }
    }
}
