//! AWQ as Nunchaku packs it: unsigned numbers of 4 bits times the scale of their group, plus its shift.

use super::super::numbers::{Number, part_numbers};
use super::AWQ_GROUP;
use crate::dequantize::{Decode, part_bytes};
use crate::error::Result;
use crate::parts::Parts;
use crate::weight::{PartRole, QuantWeight};

/// The decoder of such a weight, all sizes checked.
pub(crate) fn decoder<'a>(weight: &QuantWeight, parts: &'a dyn Parts) -> Result<Box<dyn Decode + 'a>> {
    let elements = weight.elements()?;
    let (rows, columns) = (weight.rows()?, weight.columns());
    if weight.shape.len() != 2
        || elements == 0
        || !rows.is_multiple_of(4)
        || !columns.is_multiple_of(AWQ_GROUP)
    {
        return Err(weight.bad_shape("it is no whole number of tiles"));
    }
    let data = part_bytes(weight, weight.needs(PartRole::Data)?, parts, elements / 2)?;
    let grid = |role| part_numbers(weight, role, parts, elements / AWQ_GROUP);
    let (scales, shifts) = (grid(PartRole::Scale)?, grid(PartRole::ZeroPoint)?);
    Ok(Box::new(Decoder { data, scales, shifts, rows: rows as usize, columns: columns as usize }))
}

#[derive(Debug)]
struct Decoder<'a> {
    data: &'a [u8],
    scales: (&'a [u8], Number),
    shifts: (&'a [u8], Number),
    rows: usize,
    columns: usize,
}

impl Decode for Decoder<'_> {
    fn granule(&self) -> usize {
        1
    }

    fn decode(&self, first: usize, out: &mut [f32]) {
        let group = AWQ_GROUP as usize;
        let mut done = 0;
        while done < out.len() {
            let at = first + done;
            let (row, column) = (at / self.columns, at % self.columns);
            let run = (group - column % group).min(out.len() - done);
            let place = column / group * self.rows + row;
            let scale = self.scales.1.at(self.scales.0, place);
            let shift = self.shifts.1.at(self.shifts.0, place);
            for (column, number) in (column..).zip(&mut out[done..done + run]) {
                *number = self.code(row, column) * scale + shift;
            }
            done += run;
        }
    }
}

impl Decoder<'_> {
    /// A packed number. Four rows are packed together; of 32 columns, those 8 apart share two bytes.
    fn code(&self, row: usize, column: usize) -> f32 {
        let tile = (row / 4 * (self.columns / 64) + column / 64) * 4 + row % 4;
        let word = tile * 16 + column % 64 / 32 * 8 + column % 8;
        let nibble = column % 32 / 8;
        f32::from(self.data[word * 2 + nibble / 2] >> (4 * (nibble % 2)) & 15)
    }
}
