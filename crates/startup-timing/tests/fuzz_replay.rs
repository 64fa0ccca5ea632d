//! The body of the fuzz target on its corpus, on the stable compiler, and the corpus itself.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::cell::Cell;
use std::path::Path;

#[path = "../fuzz/targets/report_file.rs"]
mod report_file;

#[test]
fn files_of_timings() {
    let accepted = Cell::new(0);
    let count = fuzz_replay::replay(Path::new(env!("CARGO_MANIFEST_DIR")), "report_file", |data| {
        report_file::run(data);
        accepted.set(accepted.get() + usize::from(startup_timing::read_bytes(data, "corpus").is_ok()));
    })
    .unwrap();
    // Both ways through the reader are in the corpus.
    assert!(accepted.get() >= 4 && count - accepted.get() >= 4, "{accepted:?} of {count}");
}
