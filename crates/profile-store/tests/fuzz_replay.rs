//! The body of the fuzz target on its corpus and on every file of `tests/corpus`, on the stable compiler.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::path::Path;

#[path = "../fuzz/targets/profile_record.rs"]
mod profile_record;

#[test]
fn records_of_any_bytes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    assert!(fuzz_replay::replay(folder, "profile_record", profile_record::run).unwrap() > 20);
}
