//! The fuzzer's entry to `targets/adapter_plan.rs`.
#![no_main]

#[path = "../targets/adapter_plan.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
