//! Matrices, as small as the reference needs them.

use std::ops::Range;

/// Rows of numbers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Matrix {
    pub(super) rows: usize,
    pub(super) numbers: Vec<f64>,
}

impl Matrix {
    pub(super) fn new(rows: usize, numbers: Vec<f64>) -> Self {
        Self { rows, numbers }
    }

    pub(super) fn columns(&self) -> usize {
        self.numbers.len().checked_div(self.rows).unwrap_or(0)
    }

    pub(super) fn at(&self, row: usize, column: usize) -> f64 {
        self.numbers[row * self.columns() + column]
    }

    /// Some of its rows; `None` if it has fewer.
    pub(super) fn rows(self, range: Range<usize>) -> Option<Self> {
        let columns = self.columns();
        let numbers = self.numbers.get(range.start * columns..range.end * columns)?.to_vec();
        Some(Self::new(range.len(), numbers))
    }

    pub(super) fn transposed(&self) -> Self {
        let columns = self.columns();
        let numbers = (0..columns).flat_map(|c| (0..self.rows).map(move |r| self.at(r, c)));
        Self::new(columns, numbers.collect())
    }

    /// The product with another.
    pub(super) fn times(&self, other: &Self) -> Self {
        let (inner, columns) = (self.columns(), other.columns());
        let mut numbers = vec![0.0; self.rows * columns];
        for (row, out) in numbers.chunks_exact_mut(columns.max(1)).enumerate() {
            for k in 0..inner {
                let factor = self.at(row, k);
                let line = &other.numbers[k * columns..(k + 1) * columns];
                out.iter_mut().zip(line).for_each(|(out, number)| *out += factor * number);
            }
        }
        Self::new(self.rows, numbers)
    }

    /// The solution of `self · x = other`, with pivots; `None` if there is none.
    pub(super) fn solve(&self, other: &Self) -> Option<Self> {
        let (n, columns) = (self.rows, other.columns());
        let (mut left, mut right) = (self.numbers.clone(), other.numbers.clone());
        for step in 0..n {
            let size = |row: &usize| left[row * n + step].abs();
            let pivot = (step..n).max_by(|a, b| size(a).total_cmp(&size(b)))?;
            let largest = left[pivot * n + step];
            if !largest.is_finite() || largest == 0.0 {
                return None;
            }
            for column in 0..n {
                left.swap(pivot * n + column, step * n + column);
            }
            for column in 0..columns {
                right.swap(pivot * columns + column, step * columns + column);
            }
            for row in (0..n).filter(|row| *row != step) {
                let factor = left[row * n + step] / left[step * n + step];
                for column in step..n {
                    left[row * n + column] -= factor * left[step * n + column];
                }
                for column in 0..columns {
                    right[row * columns + column] -= factor * right[step * columns + column];
                }
            }
        }
        for row in 0..n {
            for column in 0..columns {
                right[row * columns + column] /= left[row * n + row];
            }
        }
        Some(Self::new(n, right))
    }
}
