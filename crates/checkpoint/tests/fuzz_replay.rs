//! The bodies of the fuzz targets on their corpora and on every file of `tests/corpus`, on the stable compiler.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::path::Path;

#[path = "../fuzz/targets/gguf_header.rs"]
mod gguf_header;
#[path = "../fuzz/targets/model_metadata.rs"]
mod model_metadata;
#[path = "../fuzz/targets/safetensors_header.rs"]
mod safetensors_header;
#[path = "../fuzz/targets/shard_index.rs"]
mod shard_index;

fn replay(name: &str, target: fn(&[u8])) {
    fuzz_replay::replay(Path::new(env!("CARGO_MANIFEST_DIR")), name, target).unwrap();
}

#[test]
fn gguf_headers() {
    replay("gguf_header", gguf_header::run);
}

#[test]
fn metadata_of_models() {
    replay("model_metadata", model_metadata::run);
}

#[test]
fn safetensors_headers() {
    replay("safetensors_header", safetensors_header::run);
}

#[test]
fn shard_indexes() {
    replay("shard_index", shard_index::run);
}
