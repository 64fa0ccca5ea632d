//! What changes a layer's inputs, merged into its weight: rotations as PEFT defines them, and `GLoRA`.

use super::Given;
use super::matrix::Matrix;
use crate::error::{LoraError, Result};
use crate::key::Role;
use crate::kinds::size_of_packed;
use crate::plan::AdapterKind;

/// Rotates the columns of a weight, and multiplies its rows.
pub(super) fn rotate(given: &Given<'_>, weight: &mut [f64], columns: usize, multiplier: f64) -> Result<()> {
    let (mut stages, size) = blocks(given, multiplier)?;
    if given.target.kind == AdapterKind::OftVectors {
        // An embedding's vectors are rotated, and not what is given to a product with them: the other way around.
        stages.iter_mut().flatten().for_each(|block| *block = block.transposed());
    }
    let half = size / 2;
    for (stage, blocks) in stages.iter().enumerate() {
        let chunk = size << stage;
        // Where in a row the element at a place of the blocks is: halves of blocks that lie `2^stage` halves apart are neighbours.
        let old = |at: usize| {
            if stage == 0 {
                return at;
            }
            let (first, within) = (at / chunk * chunk, at % chunk);
            let (unit, rest) = (within / half, within % half);
            first + (unit / 2 + unit % 2 * (chunk / half / 2)) * half + rest
        };
        for row in weight.chunks_exact_mut(columns.max(1)) {
            let before: Vec<f64> = (0..columns).map(|at| row[old(at)]).collect();
            for (number, part) in before.chunks_exact(size).enumerate() {
                let block = &blocks[number % blocks.len()];
                for to in 0..size {
                    let sum = (0..size).map(|from| block.at(to, from) * part[from]).sum();
                    row[old(number * size + to)] = sum;
                }
            }
        }
    }
    if given.has(Role::Gain) {
        let gains = given.part(Role::Gain)?.1;
        for (row, gain) in weight.chunks_exact_mut(columns.max(1)).zip(gains) {
            for number in row {
                *number *= 1.0 + multiplier * (gain - 1.0);
            }
        }
    }
    Ok(())
}

/// The rotations of all stages, a part of the way from standing still, and their size.
fn blocks(given: &Given<'_>, multiplier: f64) -> Result<(Vec<Vec<Matrix>>, usize)> {
    let one = |at: usize, n: usize| if at / n == at % n { 1.0 } else { 0.0 };
    let packed = [Role::PackedBlocks, Role::EmbeddingBlocks].into_iter().find(|role| given.has(*role));
    let (mut skew, stages, size): (Vec<Matrix>, usize, usize) = if let Some(role) = packed {
        let (part, numbers) = given.part(role)?;
        let count = part.shape.last().copied().unwrap_or(1).max(1);
        let size = size_of_packed(count).unwrap_or(1) as usize;
        let unpacked = numbers.chunks_exact(count as usize).map(|packed| {
            let mut full = vec![0.0; size * size];
            let above = (0..size).flat_map(|row| (row + 1..size).map(move |column| (row, column)));
            for ((row, column), number) in above.zip(packed) {
                full[row * size + column] = *number;
                full[column * size + row] = -number;
            }
            Matrix::new(size, full)
        });
        (unpacked.collect(), 1, size)
    } else {
        let (part, numbers) = given.part(Role::HalfBlocks)?;
        let size = part.shape.last().copied().unwrap_or(1).max(1) as usize;
        let stages = if part.shape.len() == 4 { part.shape[0] as usize } else { 1 };
        let halves = numbers.chunks_exact(size * size).map(|block| {
            let block = constrained(block, given.target.constraint);
            let at = |row: usize, column: usize| block[row * size + column];
            Matrix::new(
                size,
                (0..size * size).map(|n| (at(n / size, n % size) - at(n % size, n / size)) / 2.0).collect(),
            )
        });
        (halves.collect(), stages, size)
    };
    if packed.is_some() {
        for block in &mut skew {
            block.numbers = constrained(&block.numbers, given.target.constraint);
        }
    }
    let mut turned = Vec::with_capacity(skew.len());
    for (number, block) in skew.iter().enumerate() {
        let rotation = if let Some(terms) = given.target.series {
            series(block, terms)
        } else {
            // (I − S) (I + S)⁻¹; the two factors commute.
            let with = |sign: f64| {
                let numbers = block.numbers.iter().enumerate().map(|(at, s)| one(at, size) + sign * s);
                Matrix::new(size, numbers.collect())
            };
            let layer = || given.target.layer.clone();
            with(1.0)
                .solve(&with(-1.0))
                .ok_or_else(|| LoraError::Singular { layer: layer(), block: number })?
        };
        let part = rotation.numbers.iter().enumerate();
        let part = part.map(|(at, r)| multiplier * r + (1.0 - multiplier) * one(at, size));
        turned.push(Matrix::new(size, part.collect()));
    }
    let per_stage = (turned.len() / stages.max(1)).max(1);
    Ok((turned.chunks(per_stage).map(<[Matrix]>::to_vec).collect(), size))
}

/// A block's matrix, made as long as the constraint lets it be if it is longer.
pub(super) fn constrained(block: &[f64], constraint: Option<f64>) -> Vec<f64> {
    let length = block.iter().map(|n| n * n).sum::<f64>().sqrt();
    let factor = constraint.filter(|bound| length > *bound).map_or(1.0, |bound| bound / length);
    block.iter().map(|n| n * factor).collect()
}

/// I + 2S + 2S² + … with the last power once, and with three terms as with four: as PEFT sums it.
fn series(skew: &Matrix, terms: u32) -> Matrix {
    let n = skew.rows;
    let mut sum = Matrix::new(n, (0..n * n).map(|at| if at / n == at % n { 1.0 } else { 0.0 }).collect());
    let mut add = |power: &Matrix, factor: f64| {
        sum.numbers.iter_mut().zip(&power.numbers).for_each(|(sum, number)| *sum += factor * number);
    };
    if terms > 1 {
        add(skew, 2.0);
    }
    if terms > 2 {
        let mut power = skew.times(skew);
        add(&power, 2.0);
        for _ in 3..terms - 1 {
            power = power.times(skew);
            add(&power, 2.0);
        }
        add(&power.times(skew), 1.0);
    }
    sum
}

/// W + m s (W A + B), with A a change of the inputs.
pub(super) fn low_rank(given: &Given<'_>, weight: &mut [f64], columns: usize, multiplier: f64) -> Result<()> {
    let sum = super::product::low_rank(given)?;
    let change = given.matrix(Role::InputUp)?.times(&given.matrix(Role::InputDown)?);
    let (channels, factor) = (change.rows, multiplier * given.target.scale);
    let filter = columns / channels.max(1);
    if weight.len() != sum.len() {
        return Err(given.wrong("the product", sum.len(), weight.len()));
    }
    for (row, added) in weight.chunks_exact_mut(columns.max(1)).zip(sum.chunks_exact(columns.max(1))) {
        let before = row.to_vec();
        for (at, number) in row.iter_mut().enumerate() {
            let (channel, k) = (at / filter, at % filter);
            let moved: f64 = (0..channels).map(|c| before[c * filter + k] * change.at(c, channel)).sum();
            *number += factor * (moved + added[at]);
        }
    }
    Ok(())
}
