//! The bodies of the fuzz targets on their corpora and on every file of `tests/corpus`, on the stable compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::path::Path;

#[path = "../fuzz/targets/detection.rs"]
mod detection;
#[path = "../fuzz/targets/ggml_blocks.rs"]
mod ggml_blocks;

fn replay(name: &str, target: fn(&[u8])) {
    fuzz_replay::replay(Path::new(env!("CARGO_MANIFEST_DIR")), name, target).unwrap();
}

#[test]
fn blocks_of_ggml() {
    replay("ggml_blocks", ggml_blocks::run);
}

#[test]
fn detection_of_any_file() {
    replay("detection", detection::run);
}
