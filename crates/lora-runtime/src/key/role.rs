//! What a tensor is within the adapter of its layer.

use std::fmt;

use super::Unknown;

macro_rules! roles {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// What a tensor is within the adapter of its layer.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Role {
            $($(#[$doc])* $name,)*
        }

        impl Role {
            /// Every role there is.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// Its name in plans.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

roles! {
    /// The lower factor of a low-rank product: inputs to rank.
    Down = "down",
    /// The upper factor: rank to outputs.
    Up = "up",
    /// The core between them, of convolutions.
    Mid = "mid",
    /// What is added to the outputs of the upper factor.
    UpBias = "bias",
    /// The number that stands over the rank in the adapter's scale.
    Alpha = "alpha",
    /// The lengths of the rows or columns of the weight that results.
    Magnitude = "magnitude",
    /// The whole difference to a weight.
    Diff = "diff",
    /// The whole difference to a bias.
    DiffBias = "diff_b",
    /// The whole difference to the modulation of a block.
    DiffModulation = "diff_m",
    /// The first factor of a Kronecker product.
    W1 = "w1",
    /// The upper factor of the first.
    W1A = "w1_a",
    /// The lower factor of the first.
    W1B = "w1_b",
    /// The second factor of a Kronecker product.
    W2 = "w2",
    /// The upper factor of the second.
    W2A = "w2_a",
    /// The lower factor of the second.
    W2B = "w2_b",
    /// The core of the second, of convolutions.
    T2 = "t2",
    /// The upper factor of the first of two products that are multiplied element by element.
    HadaW1A = "hada_w1_a",
    /// The lower factor of the first.
    HadaW1B = "hada_w1_b",
    /// The upper factor of the second.
    HadaW2A = "hada_w2_a",
    /// The lower factor of the second.
    HadaW2B = "hada_w2_b",
    /// The core of the first, of convolutions.
    HadaT1 = "hada_t1",
    /// The core of the second, of convolutions.
    HadaT2 = "hada_t2",
    /// Matrices whose antisymmetric parts are the rotations of blocks of outputs, through Cayley's formula.
    Blocks = "blocks",
    /// The rotations themselves.
    Rotations = "rotations",
    /// Factors of the outputs after a rotation.
    Rescale = "rescale",
    /// What stands above the diagonals of antisymmetric matrices, row by row: rotations of blocks of inputs.
    PackedBlocks = "packed_blocks",
    /// Matrices of which half the antisymmetric part gives the rotations of blocks: of inputs, or of outputs in a file without gains.
    HalfBlocks = "half_blocks",
    /// Factors of the outputs, less their bias, after a rotation of inputs.
    Gain = "gain",
    /// Factors of inputs, or of outputs with their bias.
    Scales = "scales",
    /// The lower factor of a low-rank change of an embedding: rank by its rows.
    EmbeddingA = "embedding_a",
    /// The upper factor of it: its columns by rank.
    EmbeddingB = "embedding_b",
    /// What stands above the diagonals of antisymmetric matrices, row by row: rotations of blocks of an embedding's vectors.
    EmbeddingBlocks = "embedding_blocks",
    /// The upper factor of a low-rank change of inputs: inputs by rank.
    InputUp = "input_up",
    /// The lower factor of it: rank by inputs.
    InputDown = "input_down",
}

impl Role {
    /// The role that one part of a key, between dots, names by itself.
    pub(super) fn of_segment(segment: &str) -> Option<Self> {
        Some(match segment {
            // Of each the last is what GLoRA calls it, in `LyCORIS`.
            "lora_A" | "lora_down" | "b2" => Self::Down,
            "lora_B" | "lora_up" | "b1" => Self::Up,
            "lora_mid" | "bm" => Self::Mid,
            "lora_magnitude_vector" | "dora_scale" => Self::Magnitude,
            "lokr_w1" => Self::W1,
            "lokr_w1_a" => Self::W1A,
            "lokr_w1_b" => Self::W1B,
            "lokr_w2" => Self::W2,
            "lokr_w2_a" => Self::W2A,
            "lokr_w2_b" => Self::W2B,
            "lokr_t2" => Self::T2,
            "hada_w1_a" => Self::HadaW1A,
            "hada_w1_b" => Self::HadaW1B,
            "hada_w2_a" => Self::HadaW2A,
            "hada_w2_b" => Self::HadaW2B,
            "hada_t1" => Self::HadaT1,
            "hada_t2" => Self::HadaT2,
            "oft_blocks" => Self::Blocks,
            "oft_diag" => Self::Rotations,
            "rescale" => Self::Rescale,
            "oft_R" => Self::PackedBlocks,
            "oft_r" | "boft_R" => Self::HalfBlocks,
            "oft_s" | "boft_s" => Self::Gain,
            "ia3_l" => Self::Scales,
            "lora_embedding_A" => Self::EmbeddingA,
            "lora_embedding_B" => Self::EmbeddingB,
            "oft_embedding_R" => Self::EmbeddingBlocks,
            "a1" => Self::InputUp,
            "a2" => Self::InputDown,
            _ => return None,
        })
    }

    /// What is known of an adapter's ending that is not applied.
    pub(super) fn unapplied(segment: &str) -> Option<Unknown> {
        Some(match segment {
            "on_input" => "(IA)3 adapters of LyCORIS are not applied",
            _ => return None,
        })
    }

    /// Whether the tensor is a single number.
    pub fn is_scalar(self) -> bool {
        self == Self::Alpha
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
