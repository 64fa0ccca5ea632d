//! Where an element lies in memory that is packed for matrix instructions. All places count elements of the tensor.

/// The nibble of a packed 4-bit weight: tiles of 128 rows × 64 columns, in them 16 rows, in them one row of eight lanes, in it four
/// lanes of 8 columns, twice the rows 8 apart, twice the columns 32 apart.
pub(super) fn nibble(columns: usize, row: usize, column: usize) -> usize {
    let tile = row / 128 * (columns / 64) + column / 64;
    let (pack, high, lane) = (row % 128 / 16, row % 16 / 8, row % 8);
    let (half, quarter, register) = (column % 64 / 32, column % 32 / 8, column % 8);
    ((((tile * 8 + pack) * 8 + lane) * 4 + quarter) * 4 + high * 2 + half) * 8 + register
}

/// A scale of 16 bits: for each 128 rows all groups, in them 16 rows, in the order 0 1 8 9 2 3 10 11 …
pub(super) fn scale(groups: usize, row: usize, group: usize) -> usize {
    let within = row % 16;
    let lane = within % 8 / 2 * 4 + within / 8 * 2 + within % 2;
    ((row / 128 * groups + group) * 8 + row % 128 / 16) * 16 + lane
}

/// A scale of 8 bits: for each 128 rows four groups at a time, in them row after row of eight, 8 and 32 apart.
pub(super) fn small_scale(groups: usize, row: usize, group: usize) -> usize {
    let (third, second, first) = (row % 128 / 32, row % 32 / 8, row % 8);
    (((row / 128 * (groups / 4) + group / 4) * 8 + first) * 4 + second) * 16 + third * 4 + group % 4
}

/// An element of a narrow matrix, in tiles of 16 × 16: `across` runs over lanes of rows, `along` over registers.
pub(super) fn low_rank(tile: usize, across: usize, along: usize) -> usize {
    let (high, lane) = (across % 16 / 8, across % 8);
    let (half, quarter, register) = (along % 16 / 8, along % 8 / 2, along % 2);
    (((tile * 8 + lane) * 4 + quarter) * 2 + high) * 4 + half * 2 + register
}

#[cfg(test)]
mod tests {
    use super::{low_rank, nibble, scale, small_scale};

    /// Every place is taken once.
    fn fills(rows: usize, columns: usize, place: impl Fn(usize, usize) -> usize) {
        let mut seen = vec![false; rows * columns];
        for row in 0..rows {
            for column in 0..columns {
                assert!(!std::mem::replace(&mut seen[place(row, column)], true));
            }
        }
    }

    #[test]
    fn places_fill_their_tensors() {
        fills(256, 128, |row, column| nibble(128, row, column));
        fills(256, 6, |row, group| scale(6, row, group));
        fills(256, 8, |row, group| small_scale(8, row, group));
        fills(16, 16, |across, along| low_rank(0, across, along));
    }
}
