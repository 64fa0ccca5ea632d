//! OFT and BOFT as `LyCORIS` has them: outputs are rotated in blocks, once or in the stages of a butterfly.

use super::{Adapter, Cut, MAX_BLOCK, Made, Parts, Rule, Shape, butterfly, need, no_magnitude, refuse, take};
use crate::key::Role;
use crate::plan::AdapterKind;

pub(super) const ROLES: &[Role] = &[Role::Blocks, Role::Rotations, Role::Rescale];

pub(super) fn make<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    if parts.contains_key(&Role::Blocks) && parts.contains_key(&Role::Rotations) {
        return refuse("its rotations are there twice, as blocks and as they are");
    }
    no_magnitude(parts, "has a rotation and")?;
    let tensor = match parts.get(&Role::Rotations) {
        Some(tensor) => *tensor,
        None => need(parts, Role::Blocks, "OFT")?,
    };
    let (kind, stages, blocks, size) = match tensor.shape[..] {
        [n, a, b] if a == b => (AdapterKind::Oft, 1, n, a),
        [m, n, a, b] if a == b && parts.contains_key(&Role::Blocks) => (AdapterKind::Boft, m, n, a),
        _ => {
            return refuse(format!(
                "{:?} has the shape {:?}, which is none of square blocks",
                tensor.key, tensor.shape
            ));
        }
    };
    if size == 0 || size > MAX_BLOCK {
        return refuse(format!(
            "the blocks of {:?} are of {size} rows; 1 to {MAX_BLOCK} are rotated",
            tensor.key
        ));
    }
    if blocks.checked_mul(size) != Some(layer.rows()) {
        return super::mismatch(tensor, &[layer.rows() / size, size, size], layer);
    }
    if kind == AdapterKind::Boft {
        butterfly(stages, blocks, size)?;
    }
    if let Some(rescale) = parts.get(&Role::Rescale) {
        let fits = rescale.shape.first() == Some(&layer.rows()) && rescale.shape[1..].iter().all(|n| *n == 1);
        if !fits {
            return super::mismatch(rescale, &[layer.rows(), 1], layer);
        }
    }
    let cut = Cut::Never("it rotates the outputs of the fused layer together");
    Ok(Adapter { rank: size, rule: Rule::Bound, ..Adapter::new(kind, take(parts, ROLES), cut) })
}
