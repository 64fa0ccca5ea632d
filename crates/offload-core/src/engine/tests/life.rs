//! The engine's life, call by call.

use gpu_driver::{Bytes, StreamHandle};

use super::rig::{Rig, RigDesc, minimum, plan};
use crate::model::UnitId;
use crate::units::Units;

#[test]
fn a_model_streams_through_its_budget() {
    let desc = RigDesc::tower(6, 2);
    let layout = desc.layout();
    let units = Units::whole_blocks(&layout);
    let budget = minimum(&layout, &units) + (2 << 16);
    let mut rig = Rig::new(&desc, plan(&layout, &units, budget, None), budget).unwrap();
    for _ in 0..3 {
        rig.whole_step().unwrap();
    }
    let stats = rig.engine.stats();
    assert_eq!((stats.steps, stats.visits), (3, 18));
    assert!(stats.copies >= 12 && stats.fetched_on_demand == 0, "{stats:?}");
    assert!(rig.pool.report().peak <= Bytes(budget));
    rig.engine.close(StreamHandle::DEFAULT).unwrap();
    assert!(rig.enter(UnitId(0)).is_err());
    let host = rig.host.clone();
    drop(rig);
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
}
