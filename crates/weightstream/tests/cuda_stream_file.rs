//! The example that streams from its file on a real GPU; skipped, with the reason, where there is none.
#![allow(missing_docs, clippy::unwrap_used, dead_code, clippy::print_stdout, reason = "tests")]

use gpu_driver::{CudaDriver, DeviceOrdinal};

#[path = "../examples/stream_file/main.rs"]
mod stream_file;

#[test]
fn a_network_streams_from_its_file_on_a_gpu() {
    if let Err(reason) = CudaDriver::open(DeviceOrdinal(0)) {
        // The gate sets this: there, a machine without a GPU is a failure.
        assert!(std::env::var_os("WEIGHTSTREAM_REQUIRE_GPU").is_none(), "{reason}");
        return println!("skipped: {reason}");
    }
    stream_file::run(Some("cuda"), 64).unwrap();
}
