//! The body of the fuzz target on its corpus and on every file of `corpus`, on the stable compiler.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::fs;
use std::path::Path;

#[path = "../fuzz/targets/profile_record.rs"]
mod profile_record;

#[test]
fn records_of_any_bytes() {
    let mut replayed = 0;
    for folder in ["fuzz/corpus/profile_record", "tests/corpus"] {
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let input = fs::read(&path).unwrap();
            // A failure names the input, whatever the target says.
            let outcome = std::panic::catch_unwind(|| profile_record::run(&input));
            assert!(outcome.is_ok(), "it fails on {}", path.display());
            replayed += 1;
        }
    }
    assert!(replayed > 20, "{replayed} inputs");
}
