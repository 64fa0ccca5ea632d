//! The same streaming on a real GPU; skipped, with the reason, where there is none.
#![allow(missing_docs, clippy::unwrap_used, dead_code, clippy::print_stdout, reason = "tests")]

use std::sync::Arc;

use gpu_driver::{CudaDriver, DeviceOrdinal};
use pinned_pool::StoreOptions;
use weightstream::{Bytes, Company, Driver, Share};

#[path = "../examples/mlp/main.rs"]
mod mlp;
mod streaming;

/// The first GPU; `None`, with the reason printed, where there is none and none is required.
fn gpu() -> Option<CudaDriver> {
    match CudaDriver::open(DeviceOrdinal(0)) {
        Ok(driver) => Some(driver),
        Err(reason) => {
            // The gate sets this: there, a machine without a GPU is a failure.
            assert!(std::env::var_os("WEIGHTSTREAM_REQUIRE_GPU").is_none(), "{reason}");
            println!("skipped: {reason}");
            None
        }
    }
}

#[test]
fn the_example_network_streams_to_the_same_bits_on_a_gpu() {
    if gpu().is_some() {
        mlp::run(Some("cuda")).unwrap();
    }
}

#[test]
fn streamed_bytes_are_the_models_on_a_gpu() {
    let Some(driver) = gpu() else { return };
    let driver = Arc::new(driver) as Arc<dyn Driver>;
    let before = driver.memory_info().unwrap().free;
    let page = driver.device_info().granularity.as_usize();
    streaming::suite(&driver, page - 5000);
    let after = driver.memory_info().unwrap().free;
    assert!(after.0 + Bytes::mib(64).0 >= before.0, "{before} were free before, {after} after");
}

#[test]
fn models_take_turns_on_a_gpu_that_they_share() {
    let Some(driver) = gpu() else { return };
    let driver = Arc::new(driver) as Arc<dyn Driver>;
    let before = driver.memory_info().unwrap().free;
    let page = driver.device_info().granularity;
    let share = Share::new(Arc::clone(&driver), page, Bytes::mib(2048)).unwrap();
    let attach = |name: &str, seed, percent, company: &[&str]| {
        let model = streaming::model_of(page.as_usize() - 5000, seed);
        let company = Company::Of(company.iter().map(|&name| name.into()).collect());
        streaming::attach_with(
            &driver,
            &model,
            model.bytes() * percent / 100,
            StoreOptions::default(),
            |builder| {
                builder.share(&share, name, company);
            },
        )
        .unwrap()
    };
    let (a, b, c) = (attach("a", 1, 50, &["b"]), attach("b", 2, 60, &["a"]), attach("c", 3, 200, &[]));
    for round in 0..4 {
        for model in [&a, &b, &a, &b] {
            model.step(&model.all());
        }
        assert_eq!(a.offloader.stats().arrivals, round + 1);
        c.step(&c.all());
        assert!(a.is_poisoned() && b.is_poisoned());
    }
    for model in [&a, &b, &c] {
        model.offloader.close(model.compute.handle()).unwrap();
    }
    drop((a, b, c, share));
    let after = driver.memory_info().unwrap().free;
    assert!(after.0 + Bytes::mib(64).0 >= before.0, "{before} were free before, {after} after");
}
