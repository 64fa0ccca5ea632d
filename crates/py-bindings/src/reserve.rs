//! How page-locked RAM is shared between the models of a pipeline.

use pyo3::prelude::*;
use weightstream::{
    BlockUse, Bytes, Pinning, ReserveBlock, ReserveLimits, ReserveModel, ReservePlan, memory_limit,
    memory_room, registered_bytes, reserved_share,
};

use crate::error::{Class, Failure, guarded};

/// What is wanted of a model, its blocks with whether each is copied at each step, and what is outside them.
type Model = (String, u32, Vec<(u64, bool)>, u64);

/// What is locked: by model its blocks and what is outside them, the bytes of the ring, all bytes, and the most that may be locked in the process.
type Shared = (Vec<(Vec<bool>, bool)>, u64, u64, u64);

/// Shares `share` of the RAM, 0 for the default, between models in their order, and a ring of `ring` bytes.
#[pyfunction]
pub(crate) fn share_reserved(models: Vec<Model>, share: f64, ring: u64) -> PyResult<Shared> {
    Ok(guarded(|| {
        let share = reserved_share(share, |name| std::env::var(name).ok())?;
        let memory = memory_limit().unwrap_or(Bytes(u64::MAX));
        let limits = ReserveLimits { memory, share, locked: registered_bytes(), room: memory_room() };
        let models: Vec<ReserveModel> = models.into_iter().map(reserve_model).collect::<Result<_, _>>()?;
        let left = limits.left();
        let plan = ReservePlan::new(&models, left, Bytes(ring));
        let models = plan.models.into_iter().map(|model| (model.blocks, model.rest)).collect();
        Ok((models, plan.ring.0, plan.reserved.0, (limits.locked + left).0))
    })?)
}

fn reserve_model((pinning, count, blocks, rest): Model) -> Result<ReserveModel, Failure> {
    let pinning = match pinning.as_str() {
        "none" => Pinning::None,
        "whole" => Pinning::Whole,
        "blocks" => Pinning::Blocks,
        "one in" => Pinning::OneIn(count),
        "ring" => Pinning::Ring,
        other => return Err(Failure::new(Class::Internal, format!("pinning {other:?}"))),
    };
    let block = |(bytes, each_step)| ReserveBlock {
        bytes: Bytes(bytes),
        used: if each_step { BlockUse::EachStep } else { BlockUse::Preloaded },
    };
    Ok(ReserveModel { pinning, blocks: blocks.into_iter().map(block).collect(), rest: Bytes(rest) })
}
