//! Streaming on the emulator, in every copy order and at both page sizes.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::sync::Arc;

use gpu_driver::{CopyOrder, HostDriver, HostOptions};
use pinned_pool::{HostBytes, StoreOptions};
use weightstream::{Budget, Bytes, Driver, Error, Offloader, PlanError, StreamHandle, TensorId};

mod streaming;

fn device(granularity: Bytes, order: CopyOrder) -> Arc<HostDriver> {
    let options = HostOptions::new(Bytes::mib(256)).granularity(granularity).order(order).seed(7);
    Arc::new(HostDriver::new(options).unwrap())
}

#[test]
fn streamed_bytes_are_the_models_in_every_copy_order() {
    for order in [CopyOrder::Eager, CopyOrder::Lazy, CopyOrder::Random] {
        let driver = device(Bytes::kib(64), order);
        streaming::suite(&(driver.clone() as Arc<dyn Driver>), 60_000);
        assert!(driver.counters().nothing_alive(), "{order:?}: {:?}", driver.counters());
    }
}

#[test]
fn streamed_bytes_are_the_models_at_the_page_size_of_a_gpu() {
    let driver = device(Bytes::mib(2), CopyOrder::Random);
    streaming::suite(&(driver.clone() as Arc<dyn Driver>), 700_000);
    assert!(driver.counters().nothing_alive());
}

#[test]
fn a_budget_below_the_minimum_names_it_and_the_named_one_works() {
    let driver = device(Bytes::kib(64), CopyOrder::Eager) as Arc<dyn Driver>;
    let plan = |budget: u64| {
        let mut model = Offloader::builder(Arc::clone(&driver));
        let ids: Vec<TensorId> = (0..4).map(|_| model.tensor("weight", Bytes(300_000))).collect();
        model.tower("tower", ids.iter().map(|&id| (format!("tower.{}", id.0), vec![id])).collect());
        model.budget(Budget::Bytes(Bytes(budget)));
        model.plan()
    };
    let Err(Error::Plan(PlanError::BudgetTooSmall { minimum, largest_unit, .. })) = plan(200_000) else {
        panic!("a budget below one unit was not refused");
    };
    assert!(largest_unit.starts_with("tower."), "{largest_unit}");
    assert!(plan(minimum.0).is_ok());
    assert!(plan(minimum.0 - 1).is_err());
}

#[test]
fn what_is_not_handed_over_right_is_refused_and_changes_nothing() {
    let driver = device(Bytes::kib(64), CopyOrder::Eager) as Arc<dyn Driver>;
    let mut model = Offloader::builder(driver);
    let (first, second) = (model.tensor("first", Bytes(1000)), model.tensor("second", Bytes(2000)));
    model.base([first, second]);
    let mut planned = model.plan().unwrap();
    let bytes = |size: usize| HostBytes::of(&Arc::new(vec![1_u8; size]));
    let wrong = planned.source(vec![(first, bytes(1000)), (second, bytes(1999))]).unwrap_err();
    assert!(matches!(wrong, Error::WrongSize { .. }), "{wrong}");
    let unknown = planned.source(vec![(TensorId(2), bytes(1))]).unwrap_err();
    assert!(matches!(unknown, Error::NoSuchTensor { tensor: 2, count: 2 }), "{unknown}");
    planned.source(vec![(first, bytes(1000))]).unwrap();
    assert!(planned.source(vec![(first, bytes(1000))]).is_err());
    let missing = planned.start().unwrap_err();
    assert!(missing.to_string().contains("second"), "{missing}");
}

#[test]
fn held_tensors_are_present_outside_their_turn() {
    let driver = device(Bytes::kib(64), CopyOrder::Lazy) as Arc<dyn Driver>;
    let model = streaming::model(60_000);
    let attached = streaming::attach(&driver, &model, model.bytes() * 45 / 100, StoreOptions::default());
    attached.step(&attached.all());
    let stream = attached.compute.handle();
    let last = attached.turn(10);
    let units = attached.offloader.hold(&last, stream).unwrap();
    attached.check_turn(10);
    attached.offloader.release(&units, stream).unwrap();
    attached.step(&attached.all());
    assert!(attached.offloader.hold(&[TensorId(9999)], StreamHandle::DEFAULT).is_err());
    attached.offloader.close(stream).unwrap();
}
