//! The numbers of adapters on the processor, in f64 and without haste: what faster code is compared with.
//!
//! All tensors are contiguous, slowest dimension first, and whole: rows are cut here.

mod inputs;
mod matrix;
mod product;
mod rotate;

use std::collections::BTreeMap;

use crate::error::{LoraError, Result};
use crate::key::Role;
use crate::plan::{AdapterKind, AdapterTarget, Part};
use matrix::Matrix;

/// The numbers of an adapter's tensors, by role, each as the file has it.
pub type Values<'a> = BTreeMap<Role, &'a [f64]>;

/// The parts of one target beside their numbers, every size checked.
pub(crate) struct Given<'a> {
    target: &'a AdapterTarget,
    values: &'a Values<'a>,
}

impl<'a> Given<'a> {
    fn has(&self, role: Role) -> bool {
        self.target.parts.contains_key(&role)
    }

    /// A part's description and its numbers.
    fn part(&self, role: Role) -> Result<(&'a Part, &'a [f64])> {
        let missing = |key: &str| LoraError::PartNotGiven {
            layer: self.target.layer.clone(),
            role: role.name(),
            key: key.to_owned(),
        };
        let part = self.target.parts.get(&role).ok_or_else(|| missing(""))?;
        let numbers = self.values.get(&role).ok_or_else(|| missing(&part.key))?;
        let need = part.shape.iter().product::<u64>() as usize;
        if numbers.len() != need {
            return Err(self.wrong(role.name(), numbers.len(), need));
        }
        Ok((part, numbers))
    }

    fn wrong(&self, what: &str, have: usize, need: usize) -> LoraError {
        LoraError::Numbers { layer: self.target.layer.clone(), what: what.to_owned(), have, need }
    }

    /// A part as a matrix: its first dimension, and all others; with its rows cut.
    fn matrix(&self, role: Role) -> Result<Matrix> {
        let (part, numbers) = self.part(role)?;
        let rows = part.shape.first().copied().unwrap_or(1) as usize;
        let whole = Matrix::new(rows, numbers.to_vec());
        Ok(match &part.rows {
            Some(range) => {
                let (range, have) = (range.start as usize..range.end as usize, whole.rows);
                let end = range.end;
                whole.rows(range).ok_or_else(|| self.wrong(role.name(), have, end))?
            }
            None => whole,
        })
    }
}

/// The rows of the layer's weight that a target changes, and the numbers of one row.
fn region(target: &AdapterTarget) -> (std::ops::Range<usize>, usize) {
    let rows = target.shape.first().copied().unwrap_or(1) as usize;
    let columns = target.shape.iter().skip(1).product::<u64>() as usize;
    let rows = target.rows.as_ref().map_or(0..rows, |rows| rows.start as usize..rows.end as usize);
    (rows, columns)
}

/// The difference that an adapter makes to the rows of the weight it changes, before multiplier and magnitude, scale included.
///
/// # Errors
/// If a part is missing or has other sizes than the plan says, and for rotations, which are no differences.
pub fn delta(target: &AdapterTarget, values: &Values<'_>) -> Result<Vec<f64>> {
    let given = Given { target, values };
    let mut product = match target.kind {
        AdapterKind::Lora => product::low_rank(&given)?,
        AdapterKind::Loha => product::hadamard(&given)?,
        AdapterKind::Lokr => product::kronecker(&given)?,
        AdapterKind::Diff if target.transposed => given.matrix(Role::Diff)?.transposed().numbers,
        AdapterKind::Diff => given.matrix(Role::Diff)?.numbers,
        AdapterKind::Oft
        | AdapterKind::Boft
        | AdapterKind::OftInputs
        | AdapterKind::BoftInputs
        | AdapterKind::OftVectors
        | AdapterKind::Ia3
        | AdapterKind::Glora
        | AdapterKind::DiffBias => {
            return Err(not_changed(target, "weight by a sum"));
        }
    };
    let (rows, columns) = region(target);
    if let Some(cut) = &target.cut {
        let range = cut.start as usize * columns..cut.end as usize * columns;
        let (have, need) = (product.len(), range.end);
        product = product.get(range).ok_or_else(|| given.wrong("the product", have, need))?.to_vec();
    }
    if product.len() != rows.len() * columns {
        return Err(given.wrong("the product", product.len(), rows.len() * columns));
    }
    for number in &mut product {
        *number *= target.scale;
    }
    Ok(product)
}

fn not_changed(target: &AdapterTarget, what: &'static str) -> LoraError {
    LoraError::NotChanged { layer: target.layer.clone(), kind: target.kind.name(), what }
}

/// The layer's whole weight with an adapter of this multiplier merged into it.
///
/// With a magnitude g, row lengths g₀ of the weight W and a difference D it is W' = (g₀ + m (g − g₀)) · (W + m D) / ‖W + m D‖ along the
/// magnitude's axis. A row of zeros stays one. Rotations go a part m of the way: R becomes m R + (1 − m) I.
///
/// # Errors
/// If a tensor is missing or has other sizes than the plan says, or the adapter is for a bias.
pub fn merged_weight(
    target: &AdapterTarget,
    weight: &[f64],
    values: &Values<'_>,
    multiplier: f64,
) -> Result<Vec<f64>> {
    let given = Given { target, values };
    let (rows, columns) = region(target);
    let need = target.shape.iter().product::<u64>() as usize;
    if weight.len() != need {
        return Err(given.wrong("the weight", weight.len(), need));
    }
    let mut merged = weight.to_vec();
    let part = &mut merged[rows.start * columns..rows.end * columns];
    match target.kind {
        AdapterKind::DiffBias => return Err(not_changed(target, "weight")),
        AdapterKind::Oft | AdapterKind::Boft => rotate::apply(&given, part, columns, multiplier)?,
        AdapterKind::OftInputs | AdapterKind::BoftInputs | AdapterKind::OftVectors => {
            inputs::rotate(&given, part, columns, multiplier)?;
        }
        AdapterKind::Ia3 => {
            let factors = given.part(Role::Scales)?.1;
            for (number, lane) in part.iter_mut().zip(lanes(target, rows.len() * columns, columns)) {
                let factor = factors
                    .get(lane)
                    .copied()
                    .ok_or_else(|| given.wrong("scales", factors.len(), lane + 1))?;
                *number *= 1.0 + multiplier * (factor - 1.0);
            }
        }
        AdapterKind::Glora => inputs::low_rank(&given, part, columns, multiplier)?,
        _ => {
            let before = part.to_vec();
            for (number, delta) in part.iter_mut().zip(delta(target, values)?) {
                *number += multiplier * delta;
            }
            if given.has(Role::Magnitude) {
                let magnitude = given.matrix(Role::Magnitude)?.numbers;
                let lanes = lanes(target, part.len(), columns);
                stretch(&before, part, &magnitude, &lanes, multiplier);
            }
        }
    }
    Ok(merged)
}

/// For each element of the region, which number of the magnitude it belongs to.
fn lanes(target: &AdapterTarget, elements: usize, columns: usize) -> Vec<usize> {
    let filter: usize = target.shape.iter().skip(2).product::<u64>() as usize;
    let by_column = |element: usize| element % columns / filter.max(1);
    (0..elements).map(|e| if target.axis == Some(1) { by_column(e) } else { e / columns.max(1) }).collect()
}

/// Gives each lane the length that the magnitude and the multiplier say.
fn stretch(before: &[f64], after: &mut [f64], magnitude: &[f64], lanes: &[usize], multiplier: f64) {
    let lengths = |numbers: &[f64]| {
        let mut squares = vec![0.0; magnitude.len()];
        for (number, lane) in numbers.iter().zip(lanes) {
            squares[*lane] += number * number;
        }
        squares.into_iter().map(f64::sqrt).collect::<Vec<_>>()
    };
    let (old, new) = (lengths(before), lengths(after));
    let factors: Vec<_> = magnitude
        .iter()
        .zip(old.iter().zip(&new))
        .map(|(g, (old, new))| if *new > 0.0 { (old + multiplier * (g - old)) / new } else { 0.0 })
        .collect();
    for (number, lane) in after.iter_mut().zip(lanes) {
        *number *= factors[*lane];
    }
}

/// The layer's whole bias with an adapter of this multiplier merged into it; zeros stand for a bias that it does not have.
///
/// # Errors
/// If a tensor is missing or has other sizes than the plan says, or the adapter has nothing for a bias.
pub fn merged_bias(
    target: &AdapterTarget,
    bias: &[f64],
    values: &Values<'_>,
    multiplier: f64,
) -> Result<Vec<f64>> {
    let given = Given { target, values };
    let (rows, _) = region(target);
    let (role, scale) = match target.kind {
        AdapterKind::DiffBias => (Role::Diff, 1.0),
        AdapterKind::Lora if given.has(Role::UpBias) => (Role::UpBias, target.scale),
        AdapterKind::Ia3 if target.axis == Some(0) => {
            let factors = given.part(Role::Scales)?.1;
            let mut merged = bias.to_vec();
            for (number, factor) in merged[rows].iter_mut().zip(factors) {
                *number *= 1.0 + multiplier * (factor - 1.0);
            }
            return Ok(merged);
        }
        _ => return Err(not_changed(target, "bias")),
    };
    let change = given.matrix(role)?.numbers;
    let need = target.shape.first().copied().unwrap_or(1) as usize;
    if bias.len() != need || change.len() != rows.len() {
        return Err(given.wrong("the bias", bias.len(), need));
    }
    let mut merged = bias.to_vec();
    for (number, change) in merged[rows].iter_mut().zip(change) {
        *number += multiplier * scale * change;
    }
    Ok(merged)
}
