//! The fuzzer's entry to `targets/ggml_blocks.rs`.
#![no_main]

#[path = "../targets/ggml_blocks.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
