//! What streams when: plan, schedule, simulate, and the engine that executes it.

mod model;

pub use model::{BlockDesc, BlockId, ModelDesc, TensorId, TowerDesc, UnitId};
