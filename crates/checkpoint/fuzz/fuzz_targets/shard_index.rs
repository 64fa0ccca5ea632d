//! The fuzzer's entry to `targets/shard_index.rs`.
#![no_main]

#[path = "../targets/shard_index.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
