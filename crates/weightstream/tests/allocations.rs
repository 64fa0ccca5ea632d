//! Allocations for which weights make room, on the emulator.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests")]

use std::sync::Arc;

use gpu_driver::{CopyOrder, Faulty, HostDriver, HostOptions, Verb};
use pinned_pool::StoreOptions;
use streaming::{attach, model_of};
use weightstream::{Allocations, Bytes, Driver, StreamHandle};

mod streaming;

type Device = Faulty<HostDriver>;

fn device(size: Bytes) -> (Arc<HostDriver>, Arc<Device>, Arc<dyn Driver>) {
    let options = HostOptions::new(size).granularity(Bytes::kib(4)).order(CopyOrder::Random).seed(3);
    let host = Arc::new(HostDriver::new(options).unwrap());
    let device = Arc::new(Faulty::new(Arc::clone(&host)));
    let driver: Arc<dyn Driver> = Arc::<Device>::clone(&device);
    (host, device, driver)
}

#[test]
fn allocations_are_given_back_and_refused_when_nobody_makes_room() {
    let (host, device, driver) = device(Bytes::mib(1));
    let allocations = Allocations::new(Arc::clone(&driver));
    let nobody = |_| Bytes::ZERO;
    let first = allocations.allocate(Bytes(600_000), nobody).unwrap();
    assert!(allocations.allocate(Bytes(600_000), nobody).is_err());
    let second = allocations.allocate(Bytes(1), nobody).unwrap();
    assert_ne!(first, second);
    assert!(allocations.report().0 >= Bytes(600_001));
    // Whoever gives less than is missing is asked again, and not for ever.
    let mut asked = Vec::new();
    let stingy = allocations.allocate(Bytes(600_000), |wanted| {
        asked.push(wanted);
        Bytes(1)
    });
    assert!(stingy.is_err() && asked.len() == 4, "{asked:?}");
    allocations.free(first, StreamHandle::DEFAULT).unwrap();
    allocations.free(first, StreamHandle::DEFAULT).unwrap();
    device.fail(Verb::SynchronizeStream, 2);
    assert!(allocations.free(second, StreamHandle::DEFAULT).is_err(), "it may be in use still");
    allocations.free(second, StreamHandle::DEFAULT).unwrap();
    assert_eq!(allocations.report().0, Bytes::ZERO);
    drop((allocations, driver, device));
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
}

#[test]
fn every_call_of_an_allocation_may_fail_and_leaves_nothing() {
    for verb in [Verb::CreatePages, Verb::ReserveAddress, Verb::MapPages, Verb::SetAccess, Verb::MemoryInfo] {
        let (host, device, driver) = device(Bytes::mib(1));
        let allocations = Allocations::new(Arc::clone(&driver));
        device.reset();
        device.fail(verb, 0);
        let made = allocations.allocate(Bytes(5000), |_| Bytes::ZERO);
        assert_eq!(made.is_ok(), verb == Verb::MemoryInfo, "{verb:?}: {made:?}");
        drop(made.map(|address| allocations.free(address, StreamHandle::DEFAULT).unwrap()));
        assert_eq!(allocations.report().0, Bytes::ZERO);
        drop((allocations, driver, device));
        assert!(host.counters().nothing_alive(), "{verb:?}: {:?}", host.counters());
    }
}

#[test]
fn preloaded_weights_make_room_in_the_middle_of_a_step() {
    let model = model_of(20_000, 3);
    let (host, device, driver) = device(Bytes((model.bytes() * 5 / 4).next_multiple_of(1 << 12)));
    let attached = attach(&driver, &model, model.bytes() * 45 / 100, StoreOptions::default());
    attached.step(&attached.all());
    attached.offloader.preload(Bytes(model.bytes() * 2)).unwrap();
    let allocations = Allocations::new(Arc::clone(&driver));
    let stream = attached.compute.handle();
    for round in 0..2 {
        let mut taken = Vec::new();
        attached.offloader.begin_step(stream).unwrap();
        for &unit in &attached.all() {
            attached.offloader.enter(weightstream::UnitId(unit), stream).unwrap();
            let size = Bytes(model.bytes() / 16);
            let made =
                allocations.allocate(size, |wanted| attached.offloader.release_preload(wanted).unwrap());
            taken.push(made.unwrap());
            attached.check_turn(unit as usize);
            attached.offloader.leave(weightstream::UnitId(unit), stream).unwrap();
        }
        attached.offloader.end_step(stream).unwrap();
        assert!(attached.offloader.preloaded() < Bytes(model.bytes() / 2), "round {round}");
        for address in taken {
            allocations.free(address, stream).unwrap();
        }
    }
    attached.offloader.close(stream).unwrap();
    drop((attached, allocations, driver, device));
    assert!(host.counters().nothing_alive(), "{:?}", host.counters());
}
