//! The fuzzer's entry to `targets/report_file.rs`.
#![no_main]

#[path = "../targets/report_file.rs"]
mod target;

libfuzzer_sys::fuzz_target!(|data: &[u8]| target::run(data));
