//! The body of the fuzz target on its corpus and on every file of `tests/corpus`, on the stable compiler.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::path::Path;

#[path = "../fuzz/targets/adapter_plan.rs"]
mod adapter_plan;

#[test]
fn plans_of_any_file() {
    fuzz_replay::replay(Path::new(env!("CARGO_MANIFEST_DIR")), "adapter_plan", adapter_plan::run).unwrap();
}
