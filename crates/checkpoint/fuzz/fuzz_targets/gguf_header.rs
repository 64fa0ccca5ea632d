//! The fuzzer's entry to `targets/gguf_header.rs`.
#![no_main]

#[path = "../targets/gguf_header.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
