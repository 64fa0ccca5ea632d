//! The body of the fuzz target on its corpus, on the stable compiler, and the corpus itself.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::fs;
use std::path::Path;

#[path = "../fuzz/targets/report_file.rs"]
mod report_file;

#[test]
fn files_of_timings() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/report_file");
    let (mut accepted, mut refused) = (0, 0);
    for entry in fs::read_dir(corpus).unwrap() {
        let path = entry.unwrap().path();
        let input = fs::read(&path).unwrap();
        let outcome = std::panic::catch_unwind(|| report_file::run(&input));
        assert!(outcome.is_ok(), "it fails on {}", path.display());
        let sound = startup_timing::read_bytes(&input, "corpus").is_ok();
        if sound { accepted += 1 } else { refused += 1 }
    }
    // Both ways through the reader are in the corpus.
    assert!(accepted >= 4 && refused >= 4, "{accepted} {refused}");
}
