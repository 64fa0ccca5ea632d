//! The fuzzer's entry to `targets/detection.rs`.
#![no_main]

#[path = "../targets/detection.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
