//! The fuzzer's entry to `targets/model_metadata.rs`.
#![no_main]

#[path = "../targets/model_metadata.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
