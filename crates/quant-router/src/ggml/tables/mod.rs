//! What block types look up: codebooks of vectors, signs, and the values of four-bit numbers. Spread out when the crate is
//! compiled, from the packed form in `grids.rs`.

mod grids;

/// The values of non-linear four-bit numbers.
pub(super) const NON_LINEAR: [i8; 16] =
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of four-bit floats (E2M1).
pub(super) const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub(super) static IQ2_XXS: [[i8; 8]; 256] = spread(&grids::IQ2_XXS, 2, &[8, 25, 43, 0]);
pub(super) static IQ2_XS: [[i8; 8]; 512] = spread(&grids::IQ2_XS, 2, &[8, 25, 43, 0]);
pub(super) static IQ2_S: [[i8; 8]; 1024] = spread(&grids::IQ2_S, 2, &[8, 25, 43, 0]);
pub(super) static IQ3_XXS: [[i8; 4]; 256] = spread(&grids::IQ3_XXS, 4, &[4, 12, 20, 28, 36, 44, 52, 62]);
pub(super) static IQ3_S: [[i8; 4]; 512] = spread(&grids::IQ3_S, 4, &[1, 3, 5, 7, 9, 11, 13, 15]);
pub(super) static IQ1: [[i8; 8]; 2048] = spread(&grids::IQ1, 2, &[-1, 0, 1, 0]);

/// The sign bits of eight numbers, by a byte with a bit each.
pub(super) static SIGNS: [[u32; 8]; 256] = signs();

/// The eight signs that seven bits stand for: the eighth makes the number of minuses even.
#[inline]
pub(super) fn even_signs(bits: u32) -> &'static [u32; 8] {
    let bits = bits & 127;
    &SIGNS[(bits | (bits.count_ones() & 1) << 7) as usize]
}

/// Vectors from their packed form: fields of so many bits, which are indexes of `values`.
const fn spread<const N: usize, const M: usize>(
    packed: &[u16; N],
    bits: usize,
    values: &[i8],
) -> [[i8; M]; N] {
    let mut vectors = [[0; M]; N];
    let mut row = 0;
    while row < N {
        let mut place = 0;
        while place < M {
            vectors[row][place] = values[(packed[row] >> (bits * place)) as usize & ((1 << bits) - 1)];
            place += 1;
        }
        row += 1;
    }
    vectors
}

const fn signs() -> [[u32; 8]; 256] {
    let mut signs = [[0; 8]; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut place = 0;
        while place < 8 {
            signs[byte][place] = ((byte >> place & 1) << 31) as u32;
            place += 1;
        }
        byte += 1;
    }
    signs
}
