//! `LoHa`, two low-rank products multiplied element by element, and `LoKr`, the Kronecker product of two factors.

use super::{
    Adapter, Cut, Made, Parts, Rule, Shape, magnitude_axis, matrix, mismatch, need, rank, refuse, take,
};
use crate::key::Role;
use crate::plan::AdapterKind;

pub(super) const HADAMARD: &[Role] =
    &[Role::HadaW1A, Role::HadaW1B, Role::HadaW2A, Role::HadaW2B, Role::HadaT1, Role::HadaT2];
pub(super) const KRONECKER: &[Role] =
    &[Role::W1, Role::W1A, Role::W1B, Role::W2, Role::W2A, Role::W2B, Role::T2];

const COLUMN_MAGNITUDE: Cut =
    Cut::Never("its DoRA magnitude has one number a column, for the lengths of the fused layer's columns");

pub(super) fn hadamard<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    let cores = (parts.contains_key(&Role::HadaT1), parts.contains_key(&Role::HadaT2));
    if cores.0 != cores.1 {
        return refuse("one of its two products has a core and the other has none");
    }
    let mut ranks = Vec::new();
    for (a, b, t) in
        [(Role::HadaW1A, Role::HadaW1B, Role::HadaT1), (Role::HadaW2A, Role::HadaW2B, Role::HadaT2)]
    {
        let (upper, lower) = (need(parts, a, "LoHa")?, need(parts, b, "LoHa")?);
        let (upper_shape, lower_shape) = (matrix(upper)?, matrix(lower)?);
        let r = rank(lower_shape.0)?;
        let rows = layer.rows();
        if let Some(core) = parts.get(&t) {
            // With a core both factors are of rank by outputs and rank by inputs.
            let wanted = [&[r, r], layer.filter()].concat();
            if !layer.kind.is_convolution() || core.shape != wanted {
                return mismatch(core, &wanted, layer);
            }
            if upper_shape != (r, rows) {
                return mismatch(upper, &[r, rows], layer);
            }
            let channels = layer.dims.get(1).copied().unwrap_or(1);
            if lower_shape.1 != channels {
                return mismatch(lower, &[r, channels], layer);
            }
        } else {
            if upper_shape.1 != r {
                return refuse(format!(
                    "its factors do not belong together: {:?} is not of rank {r}",
                    upper.key
                ));
            }
            if upper_shape.0 != rows {
                return mismatch(upper, &[rows, r], layer);
            }
            if lower_shape.1 != layer.columns() {
                return mismatch(lower, &[r, layer.columns()], layer);
            }
        }
        ranks.push(r);
    }
    if ranks[0] != ranks[1] {
        return refuse(format!("its two products are of ranks {} and {}", ranks[0], ranks[1]));
    }
    let axis = magnitude_axis(parts, layer)?;
    let cut = match (axis, cores.0) {
        (Some(1), _) => COLUMN_MAGNITUDE,
        (_, true) => Cut::Product,
        _ => Cut::Parts(&[Role::HadaW1A, Role::HadaW2A, Role::Magnitude]),
    };
    let parts = take(parts, &[HADAMARD, &[Role::Magnitude]].concat());
    let (rank, rule) = (ranks[0], Rule::OverRank);
    Ok(Adapter { rank, rule, axis, ..Adapter::new(AdapterKind::Loha, parts, cut) })
}

pub(super) fn kronecker<'a>(parts: &Parts<'a>, layer: &Shape) -> Made<Adapter<'a>> {
    let first = factor(parts, (Role::W1, Role::W1A, Role::W1B), None)?;
    let second = factor(parts, (Role::W2, Role::W2A, Role::W2B), Some(Role::T2))?;
    let ([rows1, columns1], [rows2, inner2 @ ..]) = (&first.shape[..], &second.shape[..]) else {
        return refuse("the first factor of its Kronecker product is no matrix");
    };
    let rows = rows1.saturating_mul(*rows2);
    let columns = inner2.iter().fold(*columns1, |all, n| all.saturating_mul(*n));
    // The second factor holds the filter, as a shape of its own or flattened behind its columns.
    let filter = inner2.get(1..).unwrap_or(&[]);
    let whole = filter == layer.filter() || filter.iter().all(|n| *n == 1);
    if rows != layer.rows() || columns != layer.columns() || !whole {
        let tensor = second.tensor;
        let made = [&[rows][..], &[columns]].concat();
        return Err(super::Trouble::Mismatch(format!(
            "its Kronecker product is {made:?} with {:?} of {:?}, and the {} layer is {:?}",
            tensor.key, tensor.shape, layer.kind, layer.dims
        )));
    }
    let r = match (first.rank, second.rank) {
        (Some(a), Some(b)) if a != b => return refuse(format!("its factors are of ranks {a} and {b}")),
        (a, b) => a.or(b),
    };
    let axis = magnitude_axis(parts, layer)?;
    let rule = if r.is_some() { Rule::OverRank } else { Rule::One };
    let cut = if axis == Some(1) { COLUMN_MAGNITUDE } else { Cut::Product };
    let parts = take(parts, &[KRONECKER, &[Role::Magnitude]].concat());
    let rank = r.unwrap_or(0);
    Ok(Adapter { rank, rule, axis, ..Adapter::new(AdapterKind::Lokr, parts, cut) })
}

struct Factor<'a> {
    tensor: &'a crate::file::AdapterTensor,
    shape: Vec<u64>,
    rank: Option<u64>,
}

/// A factor of a Kronecker product: whole, or a product itself.
fn factor<'a>(parts: &Parts<'a>, roles: (Role, Role, Role), core: Option<Role>) -> Made<Factor<'a>> {
    let (whole, a, b) = (parts.get(&roles.0), parts.get(&roles.1), parts.get(&roles.2));
    let core = core.and_then(|role| parts.get(&role));
    match (whole, a, b, core) {
        (Some(whole), None, None, None) if whole.shape.len() >= 2 => {
            Ok(Factor { tensor: whole, shape: whole.shape.clone(), rank: None })
        }
        (None, Some(a), Some(b), core) => {
            let (upper, lower) = (matrix(a)?, b.shape.clone());
            let r = rank(lower.first().copied().unwrap_or(0))?;
            let columns = lower.get(1..).filter(|rest| !rest.is_empty());
            let Some(columns) = columns else {
                return refuse(format!("{:?} has the shape {:?} and should be a matrix", b.key, b.shape));
            };
            let (rows, own) = if core.is_some() { (upper.1, upper.0) } else { (upper.0, upper.1) };
            if own != r {
                return refuse(format!("its factors do not belong together: {:?} is not of rank {r}", a.key));
            }
            let shape = match core {
                None => [&[rows], columns].concat(),
                Some(core) => match core.shape[..] {
                    [one, two, ref filter @ ..] if one == r && two == r && columns.len() == 1 => {
                        [&[rows], columns, filter].concat()
                    }
                    _ => {
                        return refuse(format!(
                            "the core {:?} of {:?} is not of rank {r}",
                            core.key, core.shape
                        ));
                    }
                },
            };
            Ok(Factor { tensor: b, shape, rank: Some(r) })
        }
        (None, None, None, _) => refuse(format!("its LoKr adapter has no part {:?}", roles.0.name())),
        (Some(_), None, None, _) => {
            refuse(format!("the part {:?} of its LoKr adapter is no matrix, or has a core", roles.0.name()))
        }
        (Some(_), _, _, _) => {
            refuse(format!("the part {:?} of its LoKr adapter is there whole and as factors", roles.0.name()))
        }
        _ => refuse(format!("the part {:?} of its LoKr adapter has one factor of two", roles.0.name())),
    }
}
