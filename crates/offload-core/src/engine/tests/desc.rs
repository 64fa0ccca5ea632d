//! What a test model and its device are like.

use gpu_driver::{Bytes, CopyOrder, HostDriver, HostOptions};

use super::Mutant;
use crate::engine::EngineOptions;
use crate::layout::{Layout, LayoutOptions};
use crate::model::{BlockDesc, ModelDesc, TensorId, TowerDesc};
use crate::plan::{Plan, PlanError, PlanRequest};
use crate::units::Units;

/// How units are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compute {
    /// By the calling thread, as on the emulator's own compute stream.
    Calling,
    /// On this many asynchronous streams in turn, as on a GPU.
    Streams(usize),
}

/// Which tensors are page-locked, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Levels {
    /// All of them, in a slab.
    Locked,
    /// None: in memory or in a file.
    Staged,
    /// Some.
    Mixed,
}

/// Where a tensor's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Locked,
    Memory,
    File,
}

impl Levels {
    pub(super) fn of(self, tensor: u32) -> Level {
        let number = tensor.wrapping_mul(2_654_435_761) >> 13;
        match self {
            Self::Locked => Level::Locked,
            Self::Staged => [Level::Memory, Level::File, Level::File][number as usize % 3],
            Self::Mixed => [Level::Locked, Level::Memory, Level::File, Level::Locked][number as usize % 4],
        }
    }
}

#[derive(Debug, Clone)]
pub(super) struct RigDesc {
    /// Sizes of tensors: of the base, and by tower and block.
    pub(super) base: Vec<u64>,
    pub(super) towers: Vec<Vec<Vec<u64>>>,
    pub(super) granularity: Bytes,
    pub(super) order: CopyOrder,
    pub(super) seed: u64,
    pub(super) compute: Compute,
    pub(super) options: EngineOptions,
    pub(super) levels: Levels,
    pub(super) mutant: Option<Mutant>,
}

impl RigDesc {
    /// One tower of `blocks` blocks of `pages` emulated pages each.
    pub(super) fn tower(blocks: usize, pages: u64) -> Self {
        Self {
            base: vec![1000],
            towers: vec![vec![vec![(pages * 32) << 10; 2]; blocks]],
            granularity: Bytes::kib(64),
            order: CopyOrder::Random,
            seed: 7,
            compute: Compute::Streams(1),
            options: EngineOptions { poison_after_use: true, ..EngineOptions::default() },
            levels: Levels::Locked,
            mutant: None,
        }
    }

    pub(super) fn layout(&self) -> Layout {
        let mut tensors = Vec::new();
        let mut add = |sizes: &[u64]| -> Vec<TensorId> {
            let first = tensors.len() as u32;
            tensors.extend(sizes.iter().map(|&size| Bytes(size)));
            (first..tensors.len() as u32).map(TensorId).collect()
        };
        let base = add(&self.base);
        let mut block = |(number, sizes): (usize, &Vec<u64>)| BlockDesc {
            name: format!("block {number}"),
            tensors: add(sizes),
        };
        let mut towers = Vec::new();
        for (number, blocks) in self.towers.iter().enumerate() {
            let blocks = blocks.iter().enumerate().map(&mut block).collect();
            towers.push(TowerDesc { name: format!("tower {number}"), blocks });
        }
        let model = ModelDesc { tensors, base, towers };
        Layout::new(&model, &LayoutOptions { granularity: self.granularity, granule: None }).unwrap()
    }
}

/// The smallest budget that these units can run with.
pub(super) fn minimum(layout: &Layout, units: &Units) -> u64 {
    let request = PlanRequest { budget: Some(Bytes(1)), ..PlanRequest::default() };
    match Plan::new(layout, units, &request) {
        Err(PlanError::BudgetTooSmall { minimum, .. }) => minimum.0,
        other => panic!("a budget of one byte gave {other:?}"),
    }
}

pub(super) fn plan(layout: &Layout, units: &Units, budget: u64, look_ahead: Option<u32>) -> Plan {
    let request = PlanRequest { budget: Some(Bytes(budget)), look_ahead, ..PlanRequest::default() };
    Plan::new(layout, units, &request).unwrap()
}

/// An emulated device for it.
pub(super) fn device(desc: &RigDesc) -> HostDriver {
    let options = HostOptions::new(Bytes::mib(512)).granularity(desc.granularity).order(desc.order);
    HostDriver::new(options.seed(desc.seed)).unwrap()
}
