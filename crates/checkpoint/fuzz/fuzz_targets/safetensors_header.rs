//! The fuzzer's entry to `targets/safetensors_header.rs`.
#![no_main]

#[path = "../targets/safetensors_header.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
