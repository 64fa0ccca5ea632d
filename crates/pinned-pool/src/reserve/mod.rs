//! How page-locked RAM is shared between the models of a process: which blocks are locked, and what streams through a
//! staging ring instead.
//!
//! ```text
//!   limit   | ring | blocks used at each step | preloaded blocks | rest of the models | 1 block in n |
//!            only if    of pinned models, in    of the same        of the same          of the other
//!            some are   their order; spread                                             models
//!            left over  evenly if short
//! ```
//!
//! Pure: it counts and decides, and locks nothing.
#![forbid(unsafe_code)]

use gpu_driver::Bytes;

use crate::error::{HostError, Result};

/// The environment variable that gives the share of the RAM that may be locked, where the caller gives none.
pub const RESERVED_SHARE_VARIABLE: &str = "perc_reserved_mem_max";

/// The share without either. On Windows the system locks about half of the RAM at most.
const DEFAULT_SHARE: f64 = if cfg!(windows) { 0.40 } else { 0.60 };

/// The share of the RAM that may be page-locked, as a fraction: what the caller gives, unless that is zero; else what the
/// environment says; else 0.60, on Windows 0.40. `variable` gives an environment variable's text.
///
/// # Errors
/// [`HostError::ReservedShare`] if the one that counts is no number from 0 to 1.
pub fn reserved_share(given: f64, variable: impl FnOnce(&str) -> Option<String>) -> Result<f64> {
    let refused = |text: String| HostError::ReservedShare { text };
    let checked = |share: f64, text: String| match share {
        share if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err(refused(text)),
    };
    if given != 0.0 {
        return checked(given, given.to_string());
    }
    match variable(RESERVED_SHARE_VARIABLE).filter(|text| !text.trim().is_empty()) {
        None => Ok(DEFAULT_SHARE),
        Some(text) => match text.trim().parse::<f64>() {
            // Zero asks for the default here as well.
            Ok(0.0) => Ok(DEFAULT_SHARE),
            Ok(share) => checked(share, text),
            Err(_) => Err(refused(text)),
        },
    }
}

/// What a process may lock.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReserveLimits {
    /// The smaller of RAM and control groups, as [`memory_limit`](crate::memory_limit) says.
    pub memory: Bytes,
    /// The share of it that may be locked, from 0 to 1.
    pub share: f64,
    /// What is locked already, as [`registered_bytes`](crate::registered_bytes) says.
    pub locked: Bytes,
    /// What can be locked now, as [`memory_room`](crate::memory_room) says, with the RAM that the weights take already if
    /// they are locked where they are.
    pub room: Option<Bytes>,
}

impl ReserveLimits {
    /// How much more may be locked.
    #[expect(clippy::cast_sign_loss, reason = "a share is not negative; what is no number is none")]
    pub fn left(&self) -> Bytes {
        let allowed = Bytes((self.memory.0 as f64 * self.share.clamp(0.0, 1.0)) as u64);
        let left = allowed - self.locked;
        self.room.map_or(left, |room| left.min(room))
    }
}

/// How a block is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum BlockUse {
    /// Copied to the device at each step.
    EachStep,
    /// In device memory while its model is active, and copied there when it becomes so.
    Preloaded,
}

/// A block of a model, in the order of their use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReserveBlock {
    /// What it takes if it is locked.
    pub bytes: Bytes,
    /// How it is used.
    pub used: BlockUse,
}

/// What is wanted of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinning {
    /// Nothing of it is locked.
    None,
    /// All of it.
    Whole,
    /// Its blocks, and nothing else of it.
    Blocks,
    /// One block in this many, at least one, as far as they fit; the others go through the ring.
    OneIn(u32),
    /// No block; all go through the ring.
    Ring,
}

/// A model as the plan sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReserveModel {
    /// What is wanted.
    pub pinning: Pinning,
    /// Its blocks.
    pub blocks: Vec<ReserveBlock>,
    /// What is outside blocks.
    pub rest: Bytes,
}

/// What of a model is locked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelReserve {
    /// By block.
    pub blocks: Vec<bool>,
    /// What is outside blocks.
    pub rest: bool,
}

/// Who gets what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservePlan {
    /// By model.
    pub models: Vec<ModelReserve>,
    /// What is left for the staging ring, at most what was asked for it; zero where nothing streams through it, or where
    /// there is no room for it.
    pub ring: Bytes,
    /// All that is locked, ring included.
    pub reserved: Bytes,
}

impl ReservePlan {
    /// Shares `left` bytes between models, in their order, and a ring of `ring` bytes.
    pub fn new(models: &[ReserveModel], left: Bytes, ring: Bytes) -> Self {
        let whole = Sharing::new(models, left).pinned();
        if whole.has_all_pinned() {
            return whole.others(ring).plan;
        }
        // Blocks of pinned models are left over: the ring that takes them comes before everything.
        let mut sharing = Sharing::new(models, left);
        sharing.reserve_ring(ring);
        sharing.pinned().others(ring).plan
    }
}

/// A plan being made.
struct Sharing<'a> {
    models: &'a [ReserveModel],
    left: Bytes,
    plan: ReservePlan,
}

impl<'a> Sharing<'a> {
    fn new(models: &'a [ReserveModel], left: Bytes) -> Self {
        let nothing =
            |model: &ReserveModel| ModelReserve { blocks: vec![false; model.blocks.len()], rest: false };
        let plan = ReservePlan {
            models: models.iter().map(nothing).collect(),
            ring: Bytes::ZERO,
            reserved: Bytes::ZERO,
        };
        Self { models, left, plan }
    }

    fn take(&mut self, bytes: Bytes) -> bool {
        let fits = bytes <= self.left;
        if fits {
            self.left = self.left - bytes;
            self.plan.reserved = self.plan.reserved + bytes;
        }
        fits
    }

    fn reserve_ring(&mut self, ring: Bytes) {
        let ring = ring.min(self.left);
        self.take(ring);
        self.plan.ring = ring;
    }

    /// The pinned models: blocks of each step, preloaded blocks, the rest.
    fn pinned(mut self) -> Self {
        for used in [BlockUse::EachStep, BlockUse::Preloaded] {
            for index in self.wanted() {
                let blocks = &self.models[index].blocks;
                let these: Vec<usize> =
                    (0..blocks.len()).filter(|&block| blocks[block].used == used).collect();
                self.spread(index, &these, these.len());
            }
        }
        for index in self.wanted() {
            let model = &self.models[index];
            if model.pinning == Pinning::Whole && self.take(model.rest) {
                self.plan.models[index].rest = true;
            }
        }
        self
    }

    fn wanted(&self) -> Vec<usize> {
        let pinned = |index: &usize| matches!(self.models[*index].pinning, Pinning::Whole | Pinning::Blocks);
        (0..self.models.len()).filter(pinned).collect()
    }

    fn has_all_pinned(&self) -> bool {
        self.wanted().iter().all(|&index| self.plan.models[index].blocks.iter().all(|&locked| locked))
    }

    /// The ring, if only other models need it, and then their part.
    fn others(mut self, ring: Bytes) -> Self {
        let streams = |model: &ReserveModel| match model.pinning {
            Pinning::Ring => !model.blocks.is_empty(),
            Pinning::OneIn(count) => count > 1 && model.blocks.len() > 1,
            _ => false,
        };
        if self.plan.ring == Bytes::ZERO && self.has_all_pinned() && self.models.iter().any(streams) {
            self.reserve_ring(ring);
        }
        for (index, model) in self.models.iter().enumerate() {
            if let Pinning::OneIn(count) = model.pinning {
                let all: Vec<usize> = (0..model.blocks.len()).collect();
                self.spread(index, &all, all.len().div_ceil(count.max(1) as usize));
            }
        }
        self
    }

    /// Takes as many of a model's blocks as fit, at most `most`, spread evenly over `blocks`.
    fn spread(&mut self, model: usize, blocks: &[usize], most: usize) {
        for count in (1..=most).rev() {
            let chosen: Vec<usize> = evenly(blocks.len(), count).map(|place| blocks[place]).collect();
            let bytes = chosen.iter().map(|&block| self.models[model].blocks[block].bytes).sum();
            if self.take(bytes) {
                for block in chosen {
                    self.plan.models[model].blocks[block] = true;
                }
                return;
            }
        }
    }
}

/// `count` of `length` places, as far from each other and from both ends as can be.
fn evenly(length: usize, count: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |index| (2 * index + 1) * length / (2 * count))
}

#[cfg(test)]
mod tests;
