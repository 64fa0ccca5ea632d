//! Real models' shapes as the planner sees them.
#![allow(dead_code, clippy::unwrap_used, reason = "shared by several test programs")]

use std::collections::BTreeMap;

use gpu_driver::Bytes;
use offload_core::{BlockDesc, BlockId, Layout, LayoutOptions, ModelDesc, TensorId, TowerDesc, Units};

/// A model under construction.
#[derive(Default)]
pub(crate) struct Builder {
    model: ModelDesc,
}

impl Builder {
    pub(crate) fn tensor(&mut self, bytes: u64) -> TensorId {
        self.model.tensors.push(Bytes(bytes));
        TensorId(self.model.tensors.len() as u32 - 1)
    }

    pub(crate) fn base(mut self, bytes: &[u64]) -> Self {
        for &bytes in bytes {
            let tensor = self.tensor(bytes);
            self.model.base.push(tensor);
        }
        self
    }

    /// A tower of alike blocks.
    pub(crate) fn tower(self, name: &str, blocks: usize, tensors: &[u64]) -> Self {
        self.unlike_tower(name, &vec![tensors.to_vec(); blocks])
    }

    pub(crate) fn unlike_tower(mut self, name: &str, blocks: &[Vec<u64>]) -> Self {
        let blocks = blocks.iter().enumerate().map(|(number, tensors)| BlockDesc {
            name: format!("{name}.{number}"),
            tensors: tensors.iter().map(|&bytes| self.tensor(bytes)).collect(),
        });
        let blocks = blocks.collect();
        self.model.towers.push(TowerDesc { name: name.to_owned(), blocks });
        self
    }

    pub(crate) fn build(self) -> ModelDesc {
        self.model
    }
}

pub(crate) fn layout(model: &ModelDesc, granularity: u64) -> Layout {
    Layout::new(model, &LayoutOptions { granularity: Bytes(granularity), granule: None }).unwrap()
}

/// SmolLM2-135M in bf16: a tied head, 30 blocks.
pub(crate) fn smollm2() -> ModelDesc {
    let (d, kv, ffn) = (576, 192, 1536);
    let matrices = [d * d, kv * d, kv * d, d * d, ffn * d, ffn * d, ffn * d, d, d];
    Builder::default()
        .base(&[49152 * d * 2, d * 2])
        .tower("model.layers", 30, &matrices.map(|elements| elements * 2))
        .build()
}

/// all-MiniLM-L6-v2 in f32: embeddings, a pooler, 6 blocks.
pub(crate) fn minilm() -> ModelDesc {
    let (d, ffn) = (384, 1536);
    let attention = [d * d, d, d * d, d, d * d, d, d * d, d, d, d];
    let rest = [ffn * d, ffn, d * ffn, d, d, d];
    let block: Vec<u64> = attention.iter().chain(&rest).map(|elements| elements * 4).collect();
    let base = [30522 * d, 512 * d, 2 * d, d, d, d * d, d].map(|elements| elements * 4);
    Builder::default().base(&base).tower("encoder.layer", 6, &block).build()
}

/// A diffusion transformer of 24 blocks, bf16: self-attention, cross-attention and a feed-forward pair, with biases.
pub(crate) fn dit() -> ModelDesc {
    let (d, ffn) = (5120, 13824);
    let linear = |inputs: u64, outputs: u64| [inputs * outputs * 2, outputs * 2];
    let mut block = vec![d * 2, d * 2];
    block.extend((0..4).flat_map(|_| linear(d, d)));
    block.extend([d * 2, d * 2]);
    block.extend((0..4).flat_map(|_| linear(d, d)));
    block.extend([d * 2, d * 2]);
    block.extend(linear(d, ffn));
    block.extend(linear(ffn, d));
    Builder::default().tower("blocks", 24, &block).build()
}

/// Every tensor on the line a unit of its own.
pub(crate) fn finest(layout: &Layout) -> Units {
    let cuts = layout.blocks().iter().enumerate().map(|(number, block)| {
        let cuts = block.tensors.iter().skip(1).map(|t| layout.offset(*t));
        (BlockId(number as u32), cuts.collect())
    });
    Units::segmented(layout, &cuts.collect::<BTreeMap<_, Vec<u64>>>(), None).unwrap()
}
