//! The bodies of the fuzz targets on their corpora and on every file of `corpus`, on the stable compiler.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::fs;
use std::path::{Path, PathBuf};

#[path = "../fuzz/targets/detection.rs"]
mod detection;
#[path = "../fuzz/targets/ggml_blocks.rs"]
mod ggml_blocks;

/// Every file below a folder of this crate.
fn files(folder: &str) -> Vec<PathBuf> {
    let mut open = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)];
    let mut files = Vec::new();
    while let Some(folder) = open.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { open.push(path) } else { files.push(path) }
        }
    }
    files
}

/// Runs a target on its own corpus, and on the files of other tests.
fn replay(name: &str, target: fn(&[u8])) {
    let own = files(&format!("fuzz/corpus/{name}"));
    assert!(!own.is_empty(), "{name} has no corpus");
    let mut inputs = own;
    inputs.extend(files("tests/corpus"));
    for path in inputs {
        // A failure names the input, whatever the target says.
        let input = fs::read(&path).unwrap();
        let outcome = std::panic::catch_unwind(|| target(&input));
        assert!(outcome.is_ok(), "{name} fails on {}", path.display());
    }
}

#[test]
fn blocks_of_ggml() {
    replay("ggml_blocks", ggml_blocks::run);
}

#[test]
fn detection_of_any_file() {
    replay("detection", detection::run);
}
