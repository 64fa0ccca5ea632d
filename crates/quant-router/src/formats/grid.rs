//! Scales over a matrix: one for all of it, for each row, or for each block, in the orders that files keep them in.

use serde::{Deserialize, Serialize};

use super::numbers::Number;

/// The order in which a file keeps the scales of a matrix's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[non_exhaustive]
pub enum Order {
    /// Row of blocks after row of blocks.
    Rows,
    /// Column of blocks after column of blocks.
    Columns,
    /// As tensor cores read them: tiles of 128 rows × 4 blocks, padded to whole tiles. In a tile, rows 32 apart follow each other.
    ///
    /// ```text
    /// byte of a tile   0 … 3          4 … 7           8 … 11          12 … 15         16 … 19
    /// row, blocks      0, 0 to 3      32, 0 to 3      64, 0 to 3      96, 0 to 3      1, 0 to 3      …
    /// ```
    Swizzled,
}

/// One number for each block of a matrix.
#[derive(Debug, Clone, Copy)]
pub(super) struct Grid<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) number: Number,
    pub(super) order: Order,
    /// Blocks below each other and beside each other. 1 × 1: one number for all.
    pub(super) blocks: [usize; 2],
}

impl Grid<'_> {
    /// The number of a block, by its row and column of blocks.
    pub(super) fn at(&self, row: usize, column: usize) -> f32 {
        self.number.at(self.bytes, place(self.order, self.blocks, row, column))
    }
}

/// Where a block's number lies among all.
fn place(order: Order, [rows, columns]: [usize; 2], row: usize, column: usize) -> usize {
    match order {
        Order::Rows => row * columns + column,
        Order::Columns => column * rows + row,
        Order::Swizzled => {
            let tile = row / 128 * columns.div_ceil(4) + column / 4;
            tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4
        }
    }
}

/// The shape of swizzled scales: whole tiles.
pub(crate) fn swizzled([rows, columns]: [u64; 2]) -> [u64; 2] {
    [rows.next_multiple_of(128), columns.next_multiple_of(4)]
}

#[cfg(test)]
mod tests {
    use super::{Order, place};

    #[test]
    fn swizzled_places_fill_their_tiles() {
        for blocks in [[1, 1], [129, 5], [256, 8]] {
            let rows = usize::next_multiple_of(blocks[0], 128);
            let columns = usize::next_multiple_of(blocks[1], 4);
            let mut seen = vec![false; rows * columns];
            for row in 0..rows {
                for column in 0..columns {
                    let at = place(Order::Swizzled, blocks, row, column);
                    assert!(!std::mem::replace(&mut seen[at], true));
                }
            }
        }
        // The picture in the documentation.
        assert_eq!(place(Order::Swizzled, [128, 4], 32, 1), 5);
        assert_eq!(place(Order::Swizzled, [128, 4], 1, 0), 16);
        assert_eq!(place(Order::Swizzled, [128, 8], 0, 4), 512);
    }
}
