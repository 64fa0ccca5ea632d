//! Measuring a step, and what planning again by it would bring, on the emulator.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpu_driver::{HostDriver, HostOptions};
use weightstream::{BlockId, Budget, Bytes, Driver, HostBytes, Offloader, StreamHandle, TensorId, UnitId};

const BLOCKS: u32 = 10;
const STREAM: StreamHandle = StreamHandle::DEFAULT;

/// Ten blocks of two tensors of 4 MiB, of which four fifths are resident: enough for the link's rate to be known.
fn offloader() -> Offloader {
    let options =
        HostOptions::new(Bytes::mib(256)).granularity(Bytes::kib(256)).bandwidth(Some(2_000_000_000));
    let driver = Arc::new(HostDriver::new(options).unwrap()) as Arc<dyn Driver>;
    let mut model = Offloader::builder(driver);
    let tensors: Vec<TensorId> = (0..2 * BLOCKS).map(|_| model.tensor("weight", Bytes::mib(4))).collect();
    let block = |pair: &[TensorId]| (format!("block.{}", pair[0].0 / 2), pair.to_vec());
    model.tower("tower", tensors.chunks(2).map(block).collect());
    model.budget(Budget::Bytes(Bytes::mib(70)));
    let mut planned = model.plan().unwrap();
    let bytes = Arc::new(vec![7_u8; 4 << 20]);
    planned.source(tensors.iter().map(|&tensor| (tensor, HostBytes::of(&bytes))).collect()).unwrap();
    planned.start().unwrap()
}

fn cuts() -> BTreeMap<BlockId, Vec<TensorId>> {
    (0..BLOCKS).map(|block| (BlockId(block), vec![TensorId(2 * block + 1)])).collect()
}

fn step(offloader: &Offloader, units: &[UnitId]) {
    offloader.begin_step(STREAM).unwrap();
    for &unit in units {
        offloader.enter(unit, STREAM).unwrap();
        std::thread::sleep(Duration::from_millis(u64::from(unit.0.is_multiple_of(2))));
        offloader.leave(unit, STREAM).unwrap();
    }
    offloader.end_step(STREAM).unwrap();
}

#[test]
fn a_measured_step_says_what_planning_again_would_bring() {
    let offloader = offloader();
    let all: Vec<UnitId> = (0..2 * BLOCKS).map(UnitId).collect();
    offloader.segment_everywhere(&cuts(), None).unwrap();
    step(&offloader, &all);
    assert_eq!(offloader.gain(&cuts(), None).unwrap(), None, "nothing was measured");
    assert!(!offloader.learn_pace());
    offloader.time_next_step();
    step(&offloader, &all);
    assert!(offloader.learn_pace());
    assert!(!offloader.learn_pace(), "there is nothing new");

    let gain = offloader.gain(&cuts(), None).unwrap().unwrap();
    // Ten visits of a millisecond and what there is to copy at no more than the modelled rate.
    let least = 0.010;
    assert!(gain.now >= least && gain.then >= least && gain.switch >= 0.0, "{gain:?}");
    assert!(
        (offloader.predict(&cuts(), None).unwrap() - gain.then).abs() < 1e-9,
        "both plan by what was measured"
    );
    let backwards: Vec<UnitId> = all.iter().rev().copied().collect();
    assert_eq!(offloader.gain(&cuts(), Some(backwards)).unwrap(), None, "another order was not measured");

    let units = offloader.segment(&cuts(), None).unwrap();
    let visits: Vec<UnitId> = offloader.plan().order.clone();
    assert!(units.iter().all(|unit| visits.contains(unit)));
    step(&offloader, &visits);
    offloader.close(STREAM).unwrap();
}

#[test]
fn a_step_in_another_order_than_the_plan_expects_teaches_nothing() {
    let offloader = offloader();
    let all: Vec<UnitId> = (0..BLOCKS).map(UnitId).collect();
    step(&offloader, &all);
    offloader.time_next_step();
    step(&offloader, &all[..5]);
    assert!(!offloader.learn_pace());
    offloader.close(STREAM).unwrap();
}
