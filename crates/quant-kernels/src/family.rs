//! The modules of kernels: one for each family of formats, as PTX that `cargo xtask codegen` compiled.

/// A module of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    /// Blocks of ggml: a scale, perhaps a minimum, and numbers.
    GgmlSimple,
    /// The K types of ggml.
    GgmlK,
    /// The types of ggml with three values.
    GgmlTernary,
    /// The types of ggml with a table of 16 values.
    GgmlTable,
    /// The types of ggml with a codebook of vectors.
    GgmlCodebook,
    /// Packed numbers times scales that lie beside them.
    Scaled,
    /// The 4-bit formats of bitsandbytes.
    Bnb,
    /// The formats of optimum-quanto below a byte.
    Quanto,
    /// W4A8.
    W4A8,
    /// GPTQ.
    Gptq,
    /// AWQ as it is packed for its GEMM.
    Awq,
    /// The packed integers of compressed-tensors.
    Compressed,
    /// The formats of Nunchaku.
    Nunchaku,
    /// Those of them that multiply matrices, by instructions for it: for Ampere and newer devices.
    NunchakuMatrix,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 14] = [
        Self::GgmlSimple,
        Self::GgmlK,
        Self::GgmlTernary,
        Self::GgmlTable,
        Self::GgmlCodebook,
        Self::Scaled,
        Self::Bnb,
        Self::Quanto,
        Self::W4A8,
        Self::Gptq,
        Self::Awq,
        Self::Compressed,
        Self::Nunchaku,
        Self::NunchakuMatrix,
    ];

    /// The name of its source, without ending.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GgmlSimple => "ggml_simple",
            Self::GgmlK => "ggml_k",
            Self::GgmlTernary => "ggml_ternary",
            Self::GgmlTable => "ggml_table",
            Self::GgmlCodebook => "ggml_codebook",
            Self::Scaled => "scaled",
            Self::Bnb => "bnb",
            Self::Quanto => "quanto",
            Self::W4A8 => "w4a8",
            Self::Gptq => "gptq",
            Self::Awq => "awq",
            Self::Compressed => "compressed",
            Self::Nunchaku => "nunchaku",
            Self::NunchakuMatrix => "nunchaku_matrix",
        }
    }

    /// Its PTX.
    pub const fn ptx(self) -> &'static str {
        match self {
            Self::GgmlSimple => include_str!("../kernels/ggml_simple.ptx"),
            Self::GgmlK => include_str!("../kernels/ggml_k.ptx"),
            Self::GgmlTernary => include_str!("../kernels/ggml_ternary.ptx"),
            Self::GgmlTable => include_str!("../kernels/ggml_table.ptx"),
            Self::GgmlCodebook => include_str!("../kernels/ggml_codebook.ptx"),
            Self::Scaled => include_str!("../kernels/scaled.ptx"),
            Self::Bnb => include_str!("../kernels/bnb.ptx"),
            Self::Quanto => include_str!("../kernels/quanto.ptx"),
            Self::W4A8 => include_str!("../kernels/w4a8.ptx"),
            Self::Gptq => include_str!("../kernels/gptq.ptx"),
            Self::Awq => include_str!("../kernels/awq.ptx"),
            Self::Compressed => include_str!("../kernels/compressed.ptx"),
            Self::Nunchaku => include_str!("../kernels/nunchaku.ptx"),
            Self::NunchakuMatrix => include_str!("../kernels/nunchaku_matrix.ptx"),
        }
    }

    /// The kernel that takes the same launches on devices that this module is not made for.
    pub const fn before(self) -> Option<(Self, &'static str)> {
        match self {
            Self::NunchakuMatrix => Some((Self::Nunchaku, "svdq")),
            _ => None,
        }
    }
}
