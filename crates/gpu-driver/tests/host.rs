//! The emulator passes the driver conformance suite in every copy order and at both granularities, and leaks
//! nothing.
#![allow(clippy::unwrap_used, reason = "tests")]

mod conformance;

use gpu_driver::{Bytes, CopyOrder, HostDriver, HostOptions};

fn conforms(options: HostOptions) {
    let driver = HostDriver::new(options).unwrap();
    for (name, check) in conformance::all() {
        check(&driver);
        let counters = driver.counters();
        assert!(counters.nothing_alive(), "{name} left something behind: {counters:?}");
        assert_eq!(counters.page_bytes_alive, Bytes::ZERO);
    }
}

fn small(order: CopyOrder) -> HostOptions {
    HostOptions::new(Bytes::mib(64)).order(order)
}

#[test]
fn eager_conforms() {
    conforms(small(CopyOrder::Eager));
    conforms(small(CopyOrder::Eager).granularity(Bytes::mib(2)));
}

#[test]
fn lazy_conforms() {
    conforms(small(CopyOrder::Lazy));
    conforms(small(CopyOrder::Lazy).granularity(Bytes::mib(2)));
}

#[test]
fn random_conforms() {
    for seed in 0..12 {
        conforms(small(CopyOrder::Random).seed(seed));
    }
    conforms(small(CopyOrder::Random).seed(99).granularity(Bytes::mib(2)));
}

#[test]
fn a_modelled_link_conforms() {
    conforms(small(CopyOrder::Eager).bandwidth(Some(8_000_000_000)));
    conforms(small(CopyOrder::Random).bandwidth(Some(20_000_000_000)));
}
