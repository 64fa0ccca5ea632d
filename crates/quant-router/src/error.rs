//! What can go wrong with quantized weights, naming the layer, the part and the numbers.

use crate::weight::PartRole;

/// The result of describing or dequantizing a weight.
pub type Result<T, E = QuantError> = std::result::Result<T, E>;

/// A refusal of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// A tensor that is no packed weight was given for one.
    #[error("{layer:?} is stored as {kind}, which is not quantized")]
    NotQuantized {
        /// The tensor.
        layer: String,
        /// How it is stored.
        kind: String,
    },
    /// A description without a part that its format needs.
    #[error("the weight {layer:?}, {format}, has no {role}")]
    NoPart {
        /// The layer.
        layer: String,
        /// Its format.
        format: String,
        /// What is missing.
        role: PartRole,
    },
    /// The bytes of a part were not given.
    #[error("the {role} of {layer:?} was not given: it is the tensor {tensor:?}")]
    PartNotGiven {
        /// The layer.
        layer: String,
        /// Which part of it.
        role: PartRole,
        /// The tensor that holds it.
        tensor: String,
    },
    /// A part has more or fewer bytes than the weight's shape asks for.
    #[error("the {role} of {layer:?} has {have} bytes and needs {need}: it is the tensor {tensor:?}")]
    PartSize {
        /// The layer.
        layer: String,
        /// Which part of it.
        role: PartRole,
        /// The tensor that holds it.
        tensor: String,
        /// Bytes that were given.
        have: u64,
        /// Bytes that the shape asks for.
        need: u64,
    },
    /// An index of groups that names one which there is not.
    #[error(
        "{tensor:?} of {layer:?} puts column {column} in group {group}; there are {groups} groups, counted from 0"
    )]
    NoSuchGroup {
        /// The layer.
        layer: String,
        /// The tensor that says which group a column is in.
        tensor: String,
        /// The first column that is in no group.
        column: u64,
        /// The group that it names.
        group: i32,
        /// How many groups the weight has.
        groups: u64,
    },
    /// A shape that blocks do not divide, or that no memory could hold.
    #[error("{layer:?} cannot have the shape {shape:?} as {format}: {why}")]
    Shape {
        /// The layer.
        layer: String,
        /// The shape.
        shape: Vec<u64>,
        /// The format.
        format: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Rows were asked for that the weight does not have.
    #[error("rows {start}..{end} of {layer:?} were asked for, which has {rows}")]
    Rows {
        /// The layer.
        layer: String,
        /// The first row asked for.
        start: u64,
        /// The row behind the last one asked for.
        end: u64,
        /// How many rows there are.
        rows: u64,
    },
    /// The memory for the numbers has not their size.
    #[error("{need} numbers of {layer:?} do not go into a target of {have}")]
    TargetSize {
        /// The layer.
        layer: String,
        /// Numbers that the target holds.
        have: u64,
        /// Numbers that were asked for.
        need: u64,
    },
    /// What a file says of a layer's format cannot be read.
    #[error("{tensor:?} says how {layer:?} is quantized and cannot be read: {why}")]
    Marker {
        /// The layer.
        layer: String,
        /// The tensor or metadata key that says it.
        tensor: String,
        /// What is wrong with it.
        why: String,
    },
    /// A packed weight without the scale that it needs.
    #[error("{layer:?} is stored as {kind} and has no scale, but {evidence}")]
    NoScale {
        /// The layer.
        layer: String,
        /// How it is stored.
        kind: String,
        /// What says that it needs one.
        evidence: String,
    },
    /// Two scales of one weight that differ.
    #[error("{layer:?} has two scales that differ: {first:?} and {second:?}")]
    ScalesDiffer {
        /// The layer.
        layer: String,
        /// One of them.
        first: String,
        /// The other.
        second: String,
    },
    /// A part of a type or shape that does not fit its weight.
    #[error("{tensor:?} of {layer:?} is {have} and should be {need}")]
    PartKind {
        /// The layer.
        layer: String,
        /// The tensor.
        tensor: String,
        /// Its type and shape.
        have: String,
        /// What would fit.
        need: String,
    },
    /// What a file says of a layer is not what its tensors are.
    #[error("the file says that {layer:?} is {says}, and its tensors are {found}")]
    Contradiction {
        /// The layer.
        layer: String,
        /// The format that is said.
        says: String,
        /// What is there.
        found: String,
    },
    /// A layer that is quantized in a way that nobody here understands.
    #[error("{layer:?} is quantized ({tensor:?} says so) in a way that is not understood: {why}")]
    NotUnderstood {
        /// The layer.
        layer: String,
        /// The tensor that says so.
        tensor: String,
        /// What is not understood.
        why: String,
    },
    /// A weight of floats that cannot be quantized so.
    #[error("{layer:?} of shape {shape:?} cannot be quantized to {kind}: {why}")]
    NotQuantizable {
        /// The layer.
        layer: String,
        /// Its shape.
        shape: Vec<u64>,
        /// The type that was asked for.
        kind: &'static str,
        /// What is in the way.
        why: &'static str,
    },
    /// Floats to be quantized of another size than the rows that they are said to be.
    #[error("the rows of {layer:?} that shall be quantized have {need} bytes, and {have} were given")]
    SourceSize {
        /// The layer.
        layer: String,
        /// Bytes that were given.
        have: u64,
        /// Bytes that so many rows have.
        need: u64,
    },
    /// A broken promise of this crate.
    #[error("a promise of this crate is broken: a type that it names itself is unknown; please report it")]
    Internal,
}
