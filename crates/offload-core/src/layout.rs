//! The address line of a model: which tensor lies where, before anything is decided about what streams.
//!
//! ```text
//! | base region: base tensors, small tensors of blocks | tower 0: block 0, block 1, … dense | tower 1: … |
//! ^ granule 0                                          ^ granule boundary                   ^ granule boundary
//! ```
//!
//! Every tensor starts at a multiple of [`ALIGNMENT`]. Inside a tower nothing is rounded further: blocks share the
//! granule they meet in, so that a budget is spent on weights and not on rounding.
#![forbid(unsafe_code)]

use std::ops::Range;

use gpu_driver::Bytes;

use crate::model::{BlockDesc, BlockId, ModelDesc, TensorId};
use crate::plan::PlanError;

/// Every tensor starts at a multiple of this, as the allocator of `PyTorch` gives, so that kernels choose alike.
pub const ALIGNMENT: u64 = 512;

/// The range is cut in at most about this many granules: setting access costs about 40 µs a granule.
const MAX_GRANULES: u64 = 2048;

/// Above this a granule is too coarse a step of the budget, whatever the model's size.
const MAX_GRANULE: u64 = 32 << 20;

/// A tensor of at most this part of its block …
const SMALL_TENSOR_PART: u64 = 128;

/// … and of at most this size is kept resident: streaming it saves nothing and costs a run of its own.
const SMALL_TENSOR_LIMIT: u64 = 1 << 20;

/// A block whose small tensors are together more than this part of it keeps them on the line: a block made of many
/// small tensors must still be able to stream.
const SMALL_TENSORS_PART: u64 = 16;

/// How an address line is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayoutOptions {
    /// The smallest piece of physical memory of the device.
    pub granularity: Bytes,
    /// The piece this model uses, a multiple of the granularity; `None` chooses by the size of the model.
    pub granule: Option<Bytes>,
}

/// A block's place on the line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSpan {
    /// Its name in the model.
    pub name: String,
    /// Which tower it belongs to, in the order the towers were described.
    pub tower: u32,
    /// Its bytes on the line; empty if all of its tensors are small.
    pub span: Range<u64>,
    /// Its tensors on the line, in address order.
    pub tensors: Vec<TensorId>,
}

/// Where every tensor of a model lies in its address range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    granule: u64,
    granules: u32,
    base_granules: u32,
    sizes: Vec<Bytes>,
    offsets: Vec<u64>,
    base: Vec<bool>,
    blocks: Vec<BlockSpan>,
    towers: Vec<Range<u64>>,
}

impl Layout {
    /// Lays a model out.
    ///
    /// # Errors
    /// A model that names a tensor twice, never, or not at all among its sizes; a granule that is no multiple of the
    /// granularity; a model that does not fit in 64-bit addresses.
    pub fn new(model: &ModelDesc, options: &LayoutOptions) -> Result<Self, PlanError> {
        check_owners(model)?;
        let packed = packed_bytes(model)?;
        let granule = choose_granule(options, packed)?;
        let count = model.tensors.len();
        let mut line = Line { cursor: 0, granule, sizes: &model.tensors, offsets: vec![0; count] };
        let mut base = vec![false; count];
        let small: Vec<Vec<bool>> = model
            .towers
            .iter()
            .flat_map(|t| &t.blocks)
            .map(|block| small_tensors(block, &model.tensors))
            .collect();
        let small_ids = model.towers.iter().flat_map(|t| &t.blocks).zip(&small).flat_map(|(block, small)| {
            block.tensors.iter().zip(small).filter(|(_, small)| **small).map(|(t, _)| *t)
        });
        for tensor in model.base.iter().copied().chain(small_ids) {
            base[tensor.0 as usize] = true;
            line.place(tensor);
        }
        line.next_granule();
        let base_granules = line.granules();
        let mut blocks = Vec::with_capacity(small.len());
        let mut towers = Vec::with_capacity(model.towers.len());
        for (number, tower) in model.towers.iter().enumerate() {
            let tower_start = line.cursor;
            for block in &tower.blocks {
                let start = line.cursor;
                let tensors: Vec<TensorId> =
                    block.tensors.iter().copied().filter(|t| !base[t.0 as usize]).collect();
                for &tensor in &tensors {
                    line.place(tensor);
                }
                let span = start..line.cursor;
                blocks.push(BlockSpan { name: block.name.clone(), tower: number as u32, span, tensors });
            }
            towers.push(tower_start..line.cursor);
            line.next_granule();
        }
        let granules = line.granules();
        let offsets = line.offsets;
        Ok(Self {
            granule,
            granules,
            base_granules,
            sizes: model.tensors.clone(),
            offsets,
            base,
            blocks,
            towers,
        })
    }

    /// The piece in which the range is backed by physical memory.
    pub fn granule(&self) -> Bytes {
        Bytes(self.granule)
    }

    /// How many granules the range has, the alias behind its end not counted.
    pub fn granules(&self) -> u32 {
        self.granules
    }

    /// How many granules the base region has, from the start of the range.
    pub fn base_granules(&self) -> u32 {
        self.base_granules
    }

    /// Where a tensor starts, in bytes from the start of the range; zero for a tensor the model does not have.
    pub fn offset(&self, tensor: TensorId) -> u64 {
        self.offsets.get(tensor.0 as usize).copied().unwrap_or_default()
    }

    /// A tensor's size; zero for a tensor the model does not have.
    pub fn bytes(&self, tensor: TensorId) -> Bytes {
        self.sizes.get(tensor.0 as usize).copied().unwrap_or_default()
    }

    /// How many tensors the model has.
    pub fn tensors(&self) -> usize {
        self.sizes.len()
    }

    /// The blocks, by [`BlockId`].
    pub fn blocks(&self) -> &[BlockSpan] {
        &self.blocks
    }

    /// A block, if there is one of this number.
    pub fn block(&self, block: BlockId) -> Option<&BlockSpan> {
        self.blocks.get(block.0 as usize)
    }

    /// The bytes of each tower, in the order they were described. Each starts on a granule.
    pub fn towers(&self) -> &[Range<u64>] {
        &self.towers
    }

    /// Whether a tensor lies in the base region: a base tensor, or a small one of a block.
    pub fn is_base(&self, tensor: TensorId) -> bool {
        self.base.get(tensor.0 as usize).copied().unwrap_or_default()
    }

    /// The bytes of all tensors, padding not counted.
    pub fn model_bytes(&self) -> Bytes {
        self.sizes.iter().copied().sum()
    }
}

/// The line under construction.
struct Line<'a> {
    cursor: u64,
    granule: u64,
    sizes: &'a [Bytes],
    offsets: Vec<u64>,
}

impl Line<'_> {
    /// Puts a tensor at the cursor. `packed_bytes` has shown that no sum overflows.
    fn place(&mut self, tensor: TensorId) {
        let index = tensor.0 as usize;
        self.offsets[index] = self.cursor;
        self.cursor += self.sizes[index].0.next_multiple_of(ALIGNMENT);
    }

    fn next_granule(&mut self) {
        self.cursor = self.cursor.next_multiple_of(self.granule);
    }

    fn granules(&self) -> u32 {
        (self.cursor / self.granule) as u32
    }
}

/// Every tensor has one owner and every owner's tensor exists.
fn check_owners(model: &ModelDesc) -> Result<(), PlanError> {
    let count = model.tensors.len();
    let mut seen = vec![false; count];
    let in_blocks = model.towers.iter().flat_map(|tower| &tower.blocks).flat_map(|block| &block.tensors);
    for &tensor in model.base.iter().chain(in_blocks) {
        match seen.get_mut(tensor.0 as usize) {
            None => return Err(PlanError::NoSuchTensor { tensor: tensor.0, count }),
            Some(true) => return Err(PlanError::TensorTwice { tensor: tensor.0 }),
            Some(first) => *first = true,
        }
    }
    match seen.iter().position(|seen| !seen) {
        Some(tensor) => Err(PlanError::TensorNowhere { tensor: tensor as u32 }),
        None => Ok(()),
    }
}

/// The bytes of all tensors at their alignment, refused if sums on the line could leave 64 bits or granule counts 32.
fn packed_bytes(model: &ModelDesc) -> Result<u64, PlanError> {
    const LIMIT: u64 = 1 << 50;
    let mut total: u64 = 0;
    for size in &model.tensors {
        total = size
            .0
            .checked_next_multiple_of(ALIGNMENT)
            .and_then(|size| total.checked_add(size))
            .filter(|&total| total <= LIMIT)
            .ok_or(PlanError::ModelTooLarge { limit: Bytes(LIMIT) })?;
    }
    Ok(total)
}

fn choose_granule(options: &LayoutOptions, packed: u64) -> Result<u64, PlanError> {
    let granularity = options.granularity.0;
    let asked = options.granule.unwrap_or(options.granularity);
    let bad = PlanError::BadGranule { granule: asked, granularity: options.granularity };
    if granularity == 0 || !granularity.is_multiple_of(ALIGNMENT) || granularity > 1 << 40 {
        return Err(bad);
    }
    if let Some(granule) = options.granule {
        let fits = granule.0 != 0 && granule.0.is_multiple_of(granularity) && granule.0 <= 1 << 40;
        // 32-bit granule numbers: one bit of room for the rounding at the ends of regions.
        return if fits && packed / granule.0 < 1 << 31 { Ok(granule.0) } else { Err(bad) };
    }
    let mut granule = granularity;
    while packed.div_ceil(granule) > MAX_GRANULES && granule * 2 <= MAX_GRANULE {
        granule *= 2;
    }
    if packed / granule < 1 << 31 { Ok(granule) } else { Err(bad) }
}

/// Which of a block's tensors are small enough to be kept resident with the base.
fn small_tensors(block: &BlockDesc, sizes: &[Bytes]) -> Vec<bool> {
    let bytes = |t: &TensorId| sizes[t.0 as usize].0;
    let total: u64 = block.tensors.iter().map(bytes).sum();
    let limit = (total / SMALL_TENSOR_PART).min(SMALL_TENSOR_LIMIT);
    let small: Vec<bool> = block.tensors.iter().map(|t| bytes(t) <= limit).collect();
    let together: u64 = block.tensors.iter().map(bytes).filter(|&bytes| bytes <= limit).sum();
    if together > total / SMALL_TENSORS_PART { vec![false; small.len()] } else { small }
}
