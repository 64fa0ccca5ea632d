//! A step as a trace: its visits, its waits and its copies, on the emulator's clock.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use gpu_driver::{HostDriver, HostOptions};
use weightstream::startup_timing::{Report, chrome_trace, folded_stacks};
use weightstream::{Budget, Bytes, Driver, HostBytes, Offloader, StreamHandle, TensorId, UnitId};

const BLOCKS: u32 = 8;
const STREAM: StreamHandle = StreamHandle::DEFAULT;

/// Eight blocks of 1 MiB behind a slow link, of which three fit.
fn offloader() -> (Arc<HostDriver>, Offloader) {
    let options = HostOptions::new(Bytes::mib(64)).granularity(Bytes::kib(64)).bandwidth(Some(100_000_000));
    let driver = Arc::new(HostDriver::new(options).unwrap());
    let mut model = Offloader::builder(Arc::clone(&driver) as Arc<dyn Driver>);
    let tensors: Vec<TensorId> = (0..BLOCKS).map(|_| model.tensor("weight", Bytes::mib(1))).collect();
    model.tower("tower", tensors.iter().map(|&id| (format!("block.{}", id.0), vec![id])).collect());
    model.budget(Budget::Bytes(Bytes::mib(3)));
    let mut planned = model.plan().unwrap();
    let bytes = Arc::new(vec![7_u8; 1 << 20]);
    planned.source(tensors.iter().map(|&tensor| (tensor, HostBytes::of(&bytes))).collect()).unwrap();
    (driver, planned.start().unwrap())
}

fn step(offloader: &Offloader) {
    offloader.begin_step(STREAM).unwrap();
    for unit in (0..BLOCKS).map(UnitId) {
        offloader.enter(unit, STREAM).unwrap();
        offloader.leave(unit, STREAM).unwrap();
    }
    offloader.end_step(STREAM).unwrap();
}

/// The trace, once all copies of the step have run.
fn traced(driver: &HostDriver, offloader: &Offloader) -> Option<Report> {
    // The next step waits for what this one has copied ahead.
    step(offloader);
    driver.synchronize_stream(STREAM).unwrap();
    offloader.take_step_trace()
}

#[test]
fn a_traced_step_has_its_visits_its_copies_and_their_bytes() {
    let (driver, offloader) = offloader();
    step(&offloader);
    assert!(traced(&driver, &offloader).is_none(), "nobody asked");
    let copied = || offloader.report().engine.stats.copied_bytes;
    offloader.trace_next_step();
    let before = copied();
    offloader.begin_step(STREAM).unwrap();
    let inside = copied();
    for unit in (0..BLOCKS).map(UnitId) {
        offloader.enter(unit, STREAM).unwrap();
        offloader.leave(unit, STREAM).unwrap();
    }
    let bytes = copied() - inside;
    offloader.end_step(STREAM).unwrap();
    assert!(before <= inside);
    let report = traced(&driver, &offloader).unwrap();
    assert!(offloader.take_step_trace().is_none(), "it is given once");

    let of = |lane: &str| report.phases.iter().filter(|phase| phase.thread == lane).collect::<Vec<_>>();
    let names: Vec<_> = of("compute stream").iter().map(|phase| phase.name.clone()).collect();
    let visits: Vec<_> = names.iter().filter(|name| name.starts_with("block.")).cloned().collect();
    assert_eq!(visits, (0..BLOCKS).map(|block| format!("block.{block}")).collect::<Vec<_>>());
    // A link of 100 MB/s takes 10 ms for each block, which computes nothing: compute waits.
    assert!(names.contains(&"wait".to_owned()), "{names:?}");
    let copies = of("copy stream");
    let sum: i64 = copies.iter().map(|copy| copy.counters["bytes"].unwrap()).sum();
    assert_eq!(u64::try_from(sum).unwrap(), bytes);
    for copy in copies {
        let least = copy.counters["bytes"].unwrap().unsigned_abs() * 10; // nanoseconds at that rate
        assert!(copy.duration >= least * 9 / 10, "{copy:?}");
    }
    assert!(folded_stacks(&report).unwrap().contains("step;block.0"));
    assert!(chrome_trace(&report).unwrap().contains("\"copy stream\""));
    let analysis = report.analysis().unwrap();
    let sum: u64 = analysis.exclusive.iter().sum();
    assert_eq!(sum + analysis.gap - analysis.overlap, report.duration);
    offloader.close(STREAM).unwrap();
}

#[test]
fn tracing_and_timing_do_not_take_each_others_step() {
    let (driver, offloader) = offloader();
    step(&offloader);
    offloader.time_next_step();
    offloader.trace_next_step();
    step(&offloader);
    assert!(traced(&driver, &offloader).is_some());
    // The times are there still; whether a pace is learnt from them depends on the link's rate being known.
    offloader.learn_pace();
    offloader.trace_next_step();
    step(&offloader);
    assert!(!offloader.learn_pace(), "nobody asked for times");
    assert!(traced(&driver, &offloader).is_some());
    offloader.close(STREAM).unwrap();
}

#[test]
fn a_step_that_is_cut_short_is_not_traced_and_the_next_is() {
    let (driver, offloader) = offloader();
    step(&offloader);
    offloader.trace_next_step();
    offloader.begin_step(STREAM).unwrap();
    offloader.enter(UnitId(0), STREAM).unwrap();
    offloader.end_step(STREAM).unwrap();
    driver.synchronize_stream(STREAM).unwrap();
    assert!(offloader.take_step_trace().is_none());
    step(&offloader);
    assert!(traced(&driver, &offloader).is_some());
    offloader.close(STREAM).unwrap();
}
