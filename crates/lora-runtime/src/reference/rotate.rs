//! Rotations of outputs, in blocks or in the stages of a butterfly, as `LyCORIS` defines them.

use super::Given;
use super::inputs::constrained;
use super::matrix::Matrix;
use crate::error::{LoraError, Result};
use crate::key::Role;
use crate::plan::AdapterKind;

/// Rotates the rows of a weight.
pub(super) fn apply(given: &Given<'_>, weight: &mut [f64], columns: usize, multiplier: f64) -> Result<()> {
    let (size, rotations) = rotations(given, multiplier)?;
    let rows = weight.len() / columns.max(1);
    let per_stage = rows / size;
    if given.target.kind == AdapterKind::Boft {
        for (stage, blocks) in rotations.chunks(per_stage).enumerate() {
            butterfly(weight, columns, size, stage, blocks);
        }
    } else {
        // One block may stand for all of them.
        for (block, rotation) in rotations.iter().cycle().take(per_stage).enumerate() {
            // The sum is over the first index of the rotation, which turns the other way.
            let turned = rotation.transposed();
            let part = &mut weight[block * size * columns..(block + 1) * size * columns];
            part.copy_from_slice(&turned.times(&Matrix::new(size, part.to_vec())).numbers);
        }
    }
    if given.has(Role::Rescale) {
        let factors = given.matrix(Role::Rescale)?.numbers;
        for (row, factor) in weight.chunks_exact_mut(columns.max(1)).zip(factors) {
            for number in row {
                *number *= 1.0 + multiplier * (factor - 1.0);
            }
        }
    }
    Ok(())
}

/// One stage: rows that lie `size / 2 · 2^stage` apart meet in one block.
fn butterfly(weight: &mut [f64], columns: usize, size: usize, stage: usize, blocks: &[Matrix]) {
    let apart = (size / 2) << stage;
    let rows = weight.len() / columns.max(1);
    // Position `(c, k, g)` of the new order is row `(c, g, k)` of the old.
    let old = |new: usize| {
        let (c, rest) = (new / (2 * apart), new % (2 * apart));
        c * 2 * apart + rest % 2 * apart + rest / 2
    };
    let mut ordered = Vec::with_capacity(weight.len());
    (0..rows).for_each(|new| ordered.extend_from_slice(&weight[old(new) * columns..][..columns]));
    for (block, rotation) in blocks.iter().enumerate() {
        let part = &mut ordered[block * size * columns..(block + 1) * size * columns];
        let turned = rotation.times(&Matrix::new(size, part.to_vec()));
        part.copy_from_slice(&turned.numbers);
    }
    for new in 0..rows {
        weight[old(new) * columns..][..columns].copy_from_slice(&ordered[new * columns..][..columns]);
    }
}

/// The rows of a block, and the rotations of all blocks a part of the way from standing still.
fn rotations(given: &Given<'_>, multiplier: f64) -> Result<(usize, Vec<Matrix>)> {
    let known = [Role::Rotations, Role::HalfBlocks].into_iter().find(|role| given.has(*role));
    let role = known.unwrap_or(Role::Blocks);
    let (part, numbers) = given.part(role)?;
    let size = part.shape.last().copied().unwrap_or(1).max(1) as usize;
    let mut blocks: Vec<_> =
        numbers.chunks_exact(size * size).map(|block| Matrix::new(size, block.to_vec())).collect();
    if role == Role::HalfBlocks {
        // Half of it, and turning the other way.
        for block in &mut blocks {
            block.numbers = constrained(&block.numbers, given.target.constraint);
            block.numbers.iter_mut().for_each(|number| *number /= -2.0);
        }
    }
    if role != Role::Rotations {
        for block in &mut blocks {
            let other = block.transposed();
            block.numbers.iter_mut().zip(other.numbers).for_each(|(a, b)| *a -= b);
        }
        let bound = given.target.scale;
        let length = blocks.iter().flat_map(|block| &block.numbers).map(|n| n * n).sum::<f64>().sqrt() + 1e-8;
        if bound > 0.0 && length > bound {
            blocks.iter_mut().flat_map(|block| &mut block.numbers).for_each(|n| *n *= bound / length);
        }
        for (number, block) in blocks.iter_mut().enumerate() {
            *block = cayley(block)
                .ok_or_else(|| LoraError::Singular { layer: given.target.layer.clone(), block: number })?;
        }
    }
    for block in &mut blocks {
        for (at, number) in block.numbers.iter_mut().enumerate() {
            let one = if at / size == at % size { 1.0 } else { 0.0 };
            *number = multiplier * *number + (1.0 - multiplier) * one;
        }
    }
    Ok((size, blocks))
}

/// `(I + Q) (I − Q)⁻¹`; the two factors commute.
fn cayley(q: &Matrix) -> Option<Matrix> {
    let n = q.rows;
    let with = |sign: f64| {
        let one = |at: usize| if at / n == at % n { 1.0 } else { 0.0 };
        Matrix::new(n, q.numbers.iter().enumerate().map(|(at, q)| one(at) + sign * q).collect())
    };
    with(-1.0).solve(&with(1.0))
}
