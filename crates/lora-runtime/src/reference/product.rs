//! The products that adapters stand for, as rows by everything else.

use super::Given;
use super::matrix::Matrix;
use crate::error::Result;
use crate::key::Role;

/// The two factors, with the core of a convolution between them where there is one.
pub(super) fn low_rank(given: &Given<'_>) -> Result<Vec<f64>> {
    if given.has(Role::EmbeddingA) {
        let (a, b) = (given.matrix(Role::EmbeddingA)?, given.matrix(Role::EmbeddingB)?);
        return Ok(b.times(&a).transposed().numbers);
    }
    let (up, down) = (given.matrix(Role::Up)?, given.matrix(Role::Down)?);
    if !given.has(Role::Mid) {
        return Ok(up.times(&down).numbers);
    }
    Ok(through_core(&given.matrix(Role::Mid)?, &up.transposed(), &down))
}

/// `out[p, q, k] = Σ core[i, j, k] · a[i, p] · b[j, q]`: `a` and `b` are rank by outputs and rank by inputs.
fn through_core(core: &Matrix, a: &Matrix, b: &Matrix) -> Vec<f64> {
    let (outputs, inputs, ranks) = (a.columns(), b.columns(), b.rows);
    let filter = core.columns() / ranks.max(1);
    // First over i, which leaves one matrix of j by filter for each output.
    let half = a.transposed().times(core);
    let mut out = vec![0.0; outputs * inputs * filter];
    for p in 0..outputs {
        for j in 0..ranks {
            for q in 0..inputs {
                let factor = b.at(j, q);
                for k in 0..filter {
                    out[(p * inputs + q) * filter + k] += half.at(p, j * filter + k) * factor;
                }
            }
        }
    }
    out
}

/// Two products, element by element.
pub(super) fn hadamard(given: &Given<'_>) -> Result<Vec<f64>> {
    let one = |a: Role, b: Role, t: Role| -> Result<Vec<f64>> {
        let (upper, lower) = (given.matrix(a)?, given.matrix(b)?);
        if given.has(t) {
            return Ok(through_core(&given.matrix(t)?, &upper, &lower));
        }
        Ok(upper.times(&lower).numbers)
    };
    let first = one(Role::HadaW1A, Role::HadaW1B, Role::HadaT1)?;
    let second = one(Role::HadaW2A, Role::HadaW2B, Role::HadaT2)?;
    Ok(first.iter().zip(&second).map(|(a, b)| a * b).collect())
}

/// The Kronecker product of two factors, each whole or a product itself.
pub(super) fn kronecker(given: &Given<'_>) -> Result<Vec<f64>> {
    let factor = |whole: Role, a: Role, b: Role| -> Result<Matrix> {
        if given.has(whole) { given.matrix(whole) } else { Ok(given.matrix(a)?.times(&given.matrix(b)?)) }
    };
    let first = factor(Role::W1, Role::W1A, Role::W1B)?;
    let second = if given.has(Role::T2) {
        let (a, b) = (given.matrix(Role::W2A)?, given.matrix(Role::W2B)?);
        let rows = a.columns();
        Matrix::new(rows, through_core(&given.matrix(Role::T2)?, &a, &b))
    } else {
        factor(Role::W2, Role::W2A, Role::W2B)?
    };
    let columns = first.columns() * second.columns();
    let mut out = vec![0.0; first.rows * second.rows * columns];
    for a in 0..first.rows {
        for c in 0..second.rows {
            let row = &mut out[(a * second.rows + c) * columns..][..columns];
            for b in 0..first.columns() {
                for d in 0..second.columns() {
                    row[b * second.columns() + d] = first.at(a, b) * second.at(c, d);
                }
            }
        }
    }
    Ok(out)
}
