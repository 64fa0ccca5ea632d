//! The model as the planner sees it: tensors by size, blocks in towers, and a base outside them.
#![forbid(unsafe_code)]

use gpu_driver::Bytes;

/// A tensor of the model, numbered from zero in the order it was described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorId(pub u32);

/// A block of a tower, numbered from zero across all towers in the order they were described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// What is copied in one go: a block's streamed part, or one segment of it. Numbered by position in the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId(pub u32);

/// A block: tensors in the order a forward is expected to read them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDesc {
    /// Its name in the model, for reports and errors.
    pub name: String,
    /// Its tensors.
    pub tensors: Vec<TensorId>,
}

/// A list of repeated blocks, run one after the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TowerDesc {
    /// Its name in the model.
    pub name: String,
    /// Its blocks, in the order they are expected to run.
    pub blocks: Vec<BlockDesc>,
}

/// A model. Every tensor is in the base or in exactly one block.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelDesc {
    /// The size of each tensor, by [`TensorId`].
    pub tensors: Vec<Bytes>,
    /// Tensors outside every tower, always resident.
    pub base: Vec<TensorId>,
    /// The towers, in the order they are expected to run.
    pub towers: Vec<TowerDesc>,
}
