//! (IA)³: one factor for each input of a layer, or for each output and its bias.

use super::{Adapter, Cut, Made, Parts, Shape, mismatch, need, no_magnitude, take};
use crate::key::Role;
use crate::plan::AdapterKind;

pub(super) const ROLES: &[Role] = &[Role::Scales];

pub(super) fn make<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    no_magnitude(parts, "has factors and")?;
    let tensor = need(parts, Role::Scales, "(IA)3")?;
    let (rows, channels) = (layer.rows(), layer.dims.get(1).copied().unwrap_or(1));
    let ones = |rest: &[u64]| rest.iter().all(|n| *n == 1);
    let axis = match tensor.shape[..] {
        // Of a convolution both are behind a dimension of 1, and only the configuration tells them apart where there are as many.
        [1, n, ref rest @ ..] if layer.kind.is_convolution() && ones(rest) => {
            match (n == rows, n == channels) {
                (true, true) => None,
                (true, false) => Some(0),
                (false, true) => Some(1),
                (false, false) => return mismatch(tensor, &[1, rows], layer),
            }
        }
        [1, n] if n == channels => Some(1),
        [n, 1] if n == rows => Some(0),
        _ => return mismatch(tensor, &[rows, 1], layer),
    };
    let cut = match axis {
        Some(0) if tensor.shape.first() == Some(&rows) => Cut::Parts(ROLES),
        Some(1) => Cut::Parts(&[]),
        _ => Cut::Never("its factors are not told apart by row"),
    };
    Ok(Adapter { axis, ..Adapter::new(AdapterKind::Ia3, take(parts, ROLES), cut) })
}
