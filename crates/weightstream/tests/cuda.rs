//! The same streaming on a real GPU; skipped, with the reason, where there is none.
#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout, reason = "tests")]

use std::sync::Arc;

use gpu_driver::{CudaDriver, DeviceOrdinal};
use weightstream::{Bytes, Driver};

mod streaming;

#[test]
fn streamed_bytes_are_the_models_on_a_gpu() {
    let driver = match CudaDriver::open(DeviceOrdinal(0)) {
        Ok(driver) => Arc::new(driver) as Arc<dyn Driver>,
        Err(reason) => {
            // The gate sets this: there, a machine without a GPU is a failure.
            assert!(std::env::var_os("WEIGHTSTREAM_REQUIRE_GPU").is_none(), "{reason}");
            println!("skipped: {reason}");
            return;
        }
    };
    let before = driver.memory_info().unwrap().free;
    let page = driver.device_info().granularity.as_usize();
    streaming::suite(&driver, page - 5000);
    let after = driver.memory_info().unwrap().free;
    assert!(after.0 + Bytes::mib(64).0 >= before.0, "{before} were free before, {after} after");
}
