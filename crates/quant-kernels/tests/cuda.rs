//! Every kernel on a real GPU, in rows and parts, on a stream of somebody else. Skipped, with the reason printed, where there is none.
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod common;

use std::sync::Arc;

use common::rig::{End, differences};
use gpu_driver::{CudaDriver, DeviceOrdinal, Driver, StreamHandle};
use quant_kernels::{Kernels, TargetKind};

/// The kernels of the first device, or `None` with the reason printed.
fn gpu(test: &str) -> Option<Kernels> {
    match CudaDriver::open(DeviceOrdinal(0)) {
        Ok(driver) => Some(Kernels::new(Arc::new(driver))),
        Err(error) => {
            println!("skipped {test}: {error}");
            None
        }
    }
}

/// What differs on the cases, on one stream.
fn check(kernels: &Kernels, cases: &[common::Case], stream: StreamHandle) {
    let mut found = Vec::new();
    for case in cases {
        for end in [End::Start, End::Back] {
            found.extend(differences(kernels, case, end, stream));
        }
    }
    println!("{} weights", cases.len());
    assert!(found.is_empty(), "{} runs differ: {found:#?}", found.len());
}

#[test]
fn blocks_of_ggml_are_the_decoders_bit_for_bit() {
    let Some(kernels) = gpu("blocks_of_ggml_are_the_decoders_bit_for_bit") else { return };
    check(&kernels, &common::corpus::ggml(), StreamHandle::DEFAULT);
    check(&kernels, &common::made::ggml(), StreamHandle::DEFAULT);
}

#[test]
fn other_formats_are_the_decoders_bit_for_bit() {
    let Some(kernels) = gpu("other_formats_are_the_decoders_bit_for_bit") else { return };
    check(&kernels, &common::corpus::formats(), StreamHandle::DEFAULT);
    check(&kernels, &common::made::formats(), StreamHandle::DEFAULT);
    check(&kernels, &common::words::all(), StreamHandle::DEFAULT);
}

/// A stream that the driver did not get from us is taken by value.
#[test]
fn a_foreign_stream_is_taken() {
    let Some(kernels) = gpu("a_foreign_stream_is_taken") else { return };
    let other = CudaDriver::open(DeviceOrdinal(0)).unwrap();
    let stream = other.create_stream().unwrap();
    check(&kernels, &common::made::formats()[..12], stream);
    // SAFETY: made above, and idle.
    unsafe { other.destroy_stream(stream) }.unwrap();
}

/// Every family's PTX is one that this driver compiles, and has every kernel that can be asked for.
#[test]
fn every_kernel_is_loaded() {
    let Some(kernels) = gpu("every_kernel_is_loaded") else { return };
    for case in common::cases() {
        for kind in TargetKind::ALL {
            kernels.prepare(&case.weight, kind).unwrap();
        }
    }
}
