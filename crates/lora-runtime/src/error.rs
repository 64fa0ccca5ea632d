//! What the caller gave that cannot be read at all. What is wrong with single keys of an adapter is no error but a part of its
//! plan: see `AdapterPlan::refused`.

/// The result of this crate's functions.
pub type Result<T, E = LoraError> = std::result::Result<T, E>;

/// A refusal of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LoraError {
    /// Two layers of a model with one name.
    #[error("the model has two layers named {name:?}")]
    DuplicateLayer {
        /// The name.
        name: String,
    },
    /// Two tensors of an adapter file with one key.
    #[error("the adapter file has the key {key:?} twice")]
    DuplicateKey {
        /// The key.
        key: String,
    },
    /// More of something than any adapter or model has.
    #[error("there are {have} {what}, and at most {limit} are read")]
    TooMany {
        /// What of, in the plural.
        what: &'static str,
        /// How many were given.
        have: usize,
        /// How many are read.
        limit: usize,
    },
    /// A kind of layer that is none.
    #[error("{name:?} is of the kind {kind:?}, which is no kind of layer: use one of {known}")]
    LayerKind {
        /// The layer.
        name: String,
        /// What was given.
        kind: String,
        /// The kinds there are.
        known: String,
    },
    /// Text that is not what it should be.
    #[error("{what} cannot be read: {why}")]
    Text {
        /// Which text.
        what: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// Numbers given for a tensor that has more or fewer.
    #[error("{what} of {layer:?} has {have} numbers and needs {need}")]
    Numbers {
        /// The layer.
        layer: String,
        /// What of it.
        what: String,
        /// Numbers that were given.
        have: usize,
        /// Numbers that the shape asks for.
        need: usize,
    },
    /// A part of an adapter that was not given.
    #[error("the part {role:?} of the adapter of {layer:?} was not given: it is the tensor {key:?}")]
    PartNotGiven {
        /// The layer.
        layer: String,
        /// Which part.
        role: &'static str,
        /// The tensor that holds it.
        key: String,
    },
    /// An adapter that has nothing to say about a bias, asked for one, or the reverse.
    #[error("the {kind} adapter of {layer:?} does not change its {what}")]
    NotChanged {
        /// The layer.
        layer: String,
        /// The adapter's kind.
        kind: &'static str,
        /// Weight or bias.
        what: &'static str,
    },
    /// A rotation that cannot be computed from these numbers.
    #[error("the rotation of block {block} of {layer:?} cannot be computed: its matrix has no inverse")]
    Singular {
        /// The layer.
        layer: String,
        /// The block, from 0.
        block: usize,
    },
}
