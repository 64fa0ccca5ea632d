//! The fuzzer's entry to `targets/profile_record.rs`.
#![no_main]

#[path = "../targets/profile_record.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
