//! The tensor types of ggml: their numbers, names, and how many bytes hold how many elements. A table and nothing else.

use std::fmt;

use ::safetensors::Dtype;

/// A tensor type of ggml, named as ggml names it.
///
/// Quantized types are stored in blocks: [`GgmlType::block_elements`] consecutive elements of a row share
/// [`GgmlType::block_bytes`] bytes.
#[allow(missing_docs, reason = "the names are ggml's and say all there is to say")]
#[allow(non_camel_case_types, reason = "ggml's names")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum GgmlType {
    F32,
    F16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q8_1,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    Q8_K,
    IQ2_XXS,
    IQ2_XS,
    IQ3_XXS,
    IQ1_S,
    IQ4_NL,
    IQ3_S,
    IQ2_S,
    IQ4_XS,
    I8,
    I16,
    I32,
    I64,
    F64,
    IQ1_M,
    BF16,
    TQ1_0,
    TQ2_0,
    MXFP4,
    NVFP4,
    Q1_0,
    Q2_0,
}

/// What the table says of one type: the type, its number in files, its name, elements and bytes of a block.
type Row = (GgmlType, u32, &'static str, u64, u64);

/// Every type, in the order of its number. The sum in each row is the block's parts as ggml lays them out.
const TABLE: &[Row] = &[
    (GgmlType::F32, 0, "F32", 1, 4),
    (GgmlType::F16, 1, "F16", 1, 2),
    (GgmlType::Q4_0, 2, "Q4_0", 32, 2 + 16),
    (GgmlType::Q4_1, 3, "Q4_1", 32, 2 + 2 + 16),
    (GgmlType::Q5_0, 6, "Q5_0", 32, 2 + 4 + 16),
    (GgmlType::Q5_1, 7, "Q5_1", 32, 2 + 2 + 4 + 16),
    (GgmlType::Q8_0, 8, "Q8_0", 32, 2 + 32),
    (GgmlType::Q8_1, 9, "Q8_1", 32, 2 + 2 + 32),
    (GgmlType::Q2_K, 10, "Q2_K", 256, 2 + 2 + 16 + 64),
    (GgmlType::Q3_K, 11, "Q3_K", 256, 2 + 64 + 32 + 12),
    (GgmlType::Q4_K, 12, "Q4_K", 256, 2 + 2 + 12 + 128),
    (GgmlType::Q5_K, 13, "Q5_K", 256, 2 + 2 + 12 + 32 + 128),
    (GgmlType::Q6_K, 14, "Q6_K", 256, 2 + 128 + 64 + 16),
    (GgmlType::Q8_K, 15, "Q8_K", 256, 4 + 256 + 32),
    (GgmlType::IQ2_XXS, 16, "IQ2_XXS", 256, 2 + 64),
    (GgmlType::IQ2_XS, 17, "IQ2_XS", 256, 2 + 64 + 8),
    (GgmlType::IQ3_XXS, 18, "IQ3_XXS", 256, 2 + 64 + 32),
    (GgmlType::IQ1_S, 19, "IQ1_S", 256, 2 + 32 + 16),
    (GgmlType::IQ4_NL, 20, "IQ4_NL", 32, 2 + 16),
    (GgmlType::IQ3_S, 21, "IQ3_S", 256, 2 + 64 + 32 + 8 + 4),
    (GgmlType::IQ2_S, 22, "IQ2_S", 256, 2 + 64 + 16),
    (GgmlType::IQ4_XS, 23, "IQ4_XS", 256, 2 + 2 + 128 + 4),
    (GgmlType::I8, 24, "I8", 1, 1),
    (GgmlType::I16, 25, "I16", 1, 2),
    (GgmlType::I32, 26, "I32", 1, 4),
    (GgmlType::I64, 27, "I64", 1, 8),
    (GgmlType::F64, 28, "F64", 1, 8),
    (GgmlType::IQ1_M, 29, "IQ1_M", 256, 32 + 16 + 8),
    (GgmlType::BF16, 30, "BF16", 1, 2),
    (GgmlType::TQ1_0, 34, "TQ1_0", 256, 2 + 4 * 13),
    (GgmlType::TQ2_0, 35, "TQ2_0", 256, 2 + 64),
    (GgmlType::MXFP4, 39, "MXFP4", 32, 1 + 16),
    (GgmlType::NVFP4, 40, "NVFP4", 64, 4 + 32),
    (GgmlType::Q1_0, 41, "Q1_0", 128, 2 + 16),
    (GgmlType::Q2_0, 42, "Q2_0", 64, 2 + 16),
];

/// Numbers that ggml once gave out and took back; their files must be converted again.
const REMOVED: &[(u32, &str)] = &[
    (4, "Q4_2"),
    (5, "Q4_3"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
];

impl GgmlType {
    /// Every type known here, in the order of its number.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|row| row.0)
    }

    /// The type with this number in a file.
    pub fn from_number(number: u32) -> Option<Self> {
        TABLE.iter().find(|row| row.1 == number).map(|row| row.0)
    }

    /// The name of a type that ggml no longer has.
    pub fn removed(number: u32) -> Option<&'static str> {
        REMOVED.iter().find(|row| row.0 == number).map(|row| row.1)
    }

    /// Its number in files.
    pub fn number(self) -> u32 {
        self.row().1
    }

    /// Its name as ggml spells it, such as `Q4_K`.
    pub fn name(self) -> &'static str {
        self.row().2
    }

    /// How many elements of a row share a block; 1 for types that are not quantized.
    pub fn block_elements(self) -> u64 {
        self.row().3
    }

    /// How many bytes a block takes.
    pub fn block_bytes(self) -> u64 {
        self.row().4
    }

    /// Whether its bytes are quantized blocks rather than numbers.
    pub fn is_quantized(self) -> bool {
        self.row().3 > 1
    }

    /// The same numbers as safetensors names them, for types that are not quantized.
    pub fn plain(self) -> Option<Dtype> {
        Some(match self {
            Self::F32 => Dtype::F32,
            Self::F16 => Dtype::F16,
            Self::BF16 => Dtype::BF16,
            Self::F64 => Dtype::F64,
            Self::I8 => Dtype::I8,
            Self::I16 => Dtype::I16,
            Self::I32 => Dtype::I32,
            Self::I64 => Dtype::I64,
            _ => return None,
        })
    }

    /// How many bytes a row of so many elements takes; none if blocks do not divide it, or it overflows.
    pub fn row_bytes(self, elements: u64) -> Option<u64> {
        if !elements.is_multiple_of(self.block_elements()) {
            return None;
        }
        (elements / self.block_elements()).checked_mul(self.block_bytes())
    }

    /// How many elements a row of so many bytes holds: bytes / block bytes × block elements. None if the bytes are
    /// not whole blocks.
    pub fn row_elements(self, bytes: u64) -> Option<u64> {
        if !bytes.is_multiple_of(self.block_bytes()) {
            return None;
        }
        (bytes / self.block_bytes()).checked_mul(self.block_elements())
    }

    fn row(self) -> &'static Row {
        // The table lists the variants in their order, which a test checks.
        &TABLE[self as usize]
    }
}

impl fmt::Display for GgmlType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_lists_the_variants_in_their_order() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, index, "{}", row.2);
            assert_eq!(format!("{:?}", row.0), row.2);
            assert_eq!(GgmlType::from_number(row.1), Some(row.0));
        }
        assert!(TABLE.windows(2).all(|pair| pair[0].1 < pair[1].1));
        assert_eq!(GgmlType::all().count(), TABLE.len());
    }

    #[test]
    fn removed_numbers_are_no_types() {
        for (number, name) in REMOVED {
            assert_eq!(GgmlType::from_number(*number), None, "{name}");
        }
        let known = (0..=42).filter(|&n| GgmlType::from_number(n).is_some()).count();
        assert_eq!(known + REMOVED.len(), 43, "every number up to the last is one or the other");
        assert_eq!(GgmlType::from_number(43), None);
    }

    #[test]
    fn plain_types_are_those_without_blocks() {
        for kind in GgmlType::all() {
            assert_eq!(kind.plain().is_none(), kind.is_quantized(), "{kind}");
            if let Some(dtype) = kind.plain() {
                assert_eq!(dtype.bitsize() as u64, 8 * kind.block_bytes(), "{kind}");
                assert_eq!(dtype.to_string(), kind.name());
            }
        }
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(GgmlType::Q8_0.row_bytes(64), Some(68));
        assert_eq!(GgmlType::Q8_0.row_bytes(3840), Some(4080));
        assert_eq!(GgmlType::Q8_0.row_elements(4080), Some(3840));
        assert_eq!(GgmlType::Q8_0.row_bytes(33), None);
        assert_eq!(GgmlType::Q8_0.row_elements(69), None);
        assert_eq!(GgmlType::F64.row_bytes(u64::MAX), None);
        assert_eq!(GgmlType::NVFP4.row_bytes(128), Some(72));
    }
}
