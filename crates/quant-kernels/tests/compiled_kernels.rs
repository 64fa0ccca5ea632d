//! Every kernel, compiled as C++ and run by the processor: the numbers are those of the decoders bit for bit, nothing beside the target is
//! written, and nothing outside the parts is read. It is left out, and says so, where there is no C++ compiler.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "tests")]

mod common;
mod compiled;

use std::sync::Arc;

use common::rig::{End, differences, differences_of};
use gpu_driver::StreamHandle;
use quant_kernels::{Kernels, TargetKind};
use quant_router::Format;

#[test]
fn kernels_are_the_decoders_bit_for_bit() {
    let Some(driver) = compiled::Compiled::new() else { return };
    let kernels = Kernels::new(driver);
    let cases = common::cases();
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let run = |first: usize| {
        let mut found = Vec::new();
        for case in cases.iter().skip(first).step_by(threads) {
            assert!(Kernels::supports(&case.weight), "{}", case.name);
            kernels.prepare(&case.weight, TargetKind::F32).unwrap();
            for end in [End::Start, End::Back] {
                found.extend(differences(&kernels, case, end, StreamHandle::DEFAULT));
            }
        }
        found
    };
    let found: Vec<_> = std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|first| scope.spawn(move || run(first))).collect();
        started.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert!(found.is_empty(), "{} runs differ: {found:#?}", found.len());
    println!("{} weights", cases.len());
}

/// What has a kernel for newer devices has another for this one, which adds as the decoder does.
#[test]
fn older_devices_have_the_decoders_bits_of_svdquant_too() {
    let Some(driver) = compiled::Compiled::turing() else { return };
    let kernels = Kernels::new(driver);
    let tiled =
        common::made::formats().into_iter().filter(|case| matches!(case.weight.format, Format::Svdq(_)));
    let mut found = Vec::new();
    for case in tiled.chain(common::made::svdq()) {
        for kind in TargetKind::ALL {
            kernels.prepare(&case.weight, kind).unwrap();
        }
        found.extend(differences_of(&kernels, &case, End::Back, StreamHandle::DEFAULT, true));
    }
    assert!(found.is_empty(), "{} runs differ: {found:#?}", found.len());
}

#[test]
fn the_emulator_runs_none_and_says_so() {
    let driver =
        gpu_driver::HostDriver::new(gpu_driver::HostOptions::new(gpu_driver::Bytes::mib(1))).unwrap();
    let kernels = Kernels::new(Arc::new(driver));
    for case in common::corpus::ggml() {
        let error = kernels.prepare(&case.weight, TargetKind::Bf16).unwrap_err().to_string();
        assert!(error.contains("runs no kernels"), "{error}");
    }
}
