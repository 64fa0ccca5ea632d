//! `SVDQuant`: 4-bit numbers for smoothed inputs, and two narrow matrices for what they miss.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::super::numbers::{E2M1, Number, part_numbers};
use super::{RANKS, TILE, order};
use crate::dequantize::{Decode, part_bytes};
use crate::error::Result;
use crate::parts::Parts;
use crate::weight::{PartRole, QuantWeight};

/// What the numbers are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum SvdqKind {
    /// Integers from -8 to 7, a scale of 16 bits for 64 columns.
    Int4,
    /// E2M1, an FP8 scale for 16 columns.
    Fp4,
}

/// The weight's numbers are number × [`PartRole::Scale`] (× [`PartRole::GlobalScale`] × [`PartRole::RowScale`] where there are any) ÷
/// [`PartRole::Smooth`] + [`PartRole::LowRankUp`] · [`PartRole::LowRankDown`], computed in f64 and rounded once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
pub struct Svdq {
    /// The numbers.
    pub kind: SvdqKind,
    /// The rank of the narrow matrices.
    pub rank: u64,
}

impl Svdq {
    /// Columns that share a scale.
    pub fn group(&self) -> u64 {
        if self.kind == SvdqKind::Int4 { 64 } else { 16 }
    }
}

impl fmt::Display for Svdq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.kind == SvdqKind::Int4 { "INT4" } else { "FP4" };
        write!(f, "SVDQuant {kind} of rank {}", self.rank)
    }
}

/// The decoder of such a weight, all sizes checked.
pub(crate) fn decoder<'a>(
    weight: &QuantWeight,
    format: Svdq,
    parts: &'a dyn Parts,
) -> Result<Box<dyn Decode + 'a>> {
    let elements = weight.elements()?;
    let (rows, columns) = (weight.rows()?, weight.columns());
    if weight.shape.len() != 2
        || elements == 0
        || !rows.is_multiple_of(TILE)
        || !columns.is_multiple_of(TILE)
        || !format.rank.is_multiple_of(RANKS)
    {
        return Err(weight.bad_shape("it is no whole number of tiles"));
    }
    let numbers = |role, count| part_numbers(weight, role, parts, count);
    let data = part_bytes(weight, weight.needs(PartRole::Data)?, parts, elements / 2)?;
    let groups = columns / format.group();
    let scales = numbers(PartRole::Scale, rows.saturating_mul(groups))?;
    let (smooth, number) = numbers(PartRole::Smooth, columns)?;
    let vector = |bytes, number: Number, length: u64| -> Vec<f64> {
        (0..length as usize).map(|at| f64::from(number.at(bytes, order::scale(1, at, 0)))).collect()
    };
    let smooth = vector(smooth, number, columns);
    let mut factors = vec![1.0; rows as usize];
    if weight.part(PartRole::RowScale).is_some() {
        let (bytes, number) = numbers(PartRole::RowScale, rows)?;
        factors = vector(bytes, number, rows);
    }
    if weight.part(PartRole::GlobalScale).is_some() {
        let (bytes, number) = numbers(PartRole::GlobalScale, 1)?;
        let whole = f64::from(number.at(bytes, 0));
        for factor in &mut factors {
            *factor *= whole;
        }
    }
    let up = numbers(PartRole::LowRankUp, rows.saturating_mul(format.rank))?;
    let (bytes, number) = numbers(PartRole::LowRankDown, columns.saturating_mul(format.rank))?;
    let (rank, columns) = (format.rank as usize, columns as usize);
    let mut down = vec![0.0; rank * columns];
    for (index, value) in down.iter_mut().enumerate() {
        let (across, along) = (index / columns, index % columns);
        let tile = along / 16 * (rank / 16) + across / 16;
        *value = f64::from(number.at(bytes, order::low_rank(tile, across, along)));
    }
    Ok(Box::new(Decoder { data, kind: format.kind, scales, smooth, factors, up, down, rank, columns }))
}

#[derive(Debug)]
struct Decoder<'a> {
    data: &'a [u8],
    kind: SvdqKind,
    scales: (&'a [u8], Number),
    /// By column.
    smooth: Vec<f64>,
    /// By row.
    factors: Vec<f64>,
    up: (&'a [u8], Number),
    /// Rank × columns.
    down: Vec<f64>,
    rank: usize,
    columns: usize,
}

impl Decode for Decoder<'_> {
    fn granule(&self) -> usize {
        1
    }

    fn decode(&self, first: usize, out: &mut [f32]) {
        let mut sums = Vec::new();
        let mut done = 0;
        while done < out.len() {
            let at = first + done;
            let (row, column) = (at / self.columns, at % self.columns);
            let run = (self.columns - column).min(out.len() - done);
            sums.clear();
            sums.extend((column..column + run).map(|column| self.number(row, column)));
            for rank in 0..self.rank {
                let tile = row / 16 * (self.rank / 16) + rank / 16;
                let up = f64::from(self.up.1.at(self.up.0, order::low_rank(tile, row, rank)));
                let down = &self.down[rank * self.columns + column..];
                for (sum, down) in sums.iter_mut().zip(down) {
                    *sum += up * down;
                }
            }
            for (out, sum) in out[done..done + run].iter_mut().zip(&sums) {
                *out = *sum as f32;
            }
            done += run;
        }
    }
}

impl Decoder<'_> {
    /// The number of the packed part alone.
    fn number(&self, row: usize, column: usize) -> f64 {
        let place = order::nibble(self.columns, row, column);
        let code = self.data[place / 2] >> (4 * (place % 2)) & 15;
        let (number, place) = match self.kind {
            SvdqKind::Int4 => {
                // The nibble's sign is its highest bit.
                let number = f64::from((code << 4).cast_signed() >> 4);
                (number, order::scale(self.columns / 64, row, column / 64))
            }
            SvdqKind::Fp4 => {
                let number = f64::from(E2M1[usize::from(code)]);
                (number, order::small_scale(self.columns / 16, row, column / 16))
            }
        };
        number * f64::from(self.scales.1.at(self.scales.0, place)) * self.factors[row] / self.smooth[column]
    }
}
