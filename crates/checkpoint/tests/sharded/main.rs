//! Models in several files: indexes, numbered shards, folders, lists of files, and everything that can be wrong with them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

#[path = "../common/mod.rs"]
mod common;
mod folders;
mod indexes;
mod numbered;

use std::fs;
use std::path::Path;

use checkpoint::{Checkpoint, OpenOptions, Result};
use common::model;

/// One tensor of four bytes.
pub(crate) fn shard(name: &str) -> Vec<u8> {
    model(&[(name, "F32", &[1], 4)], &[("format", "pt")])
}

pub(crate) fn folder(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

pub(crate) fn index(pairs: &[(&str, &str)]) -> Vec<u8> {
    let pairs: Vec<_> = pairs.iter().map(|(tensor, file)| format!("{tensor:?}:{file:?}")).collect();
    format!("{{\"metadata\":{{\"total_size\":12}},\"weight_map\":{{{}}}}}", pairs.join(",")).into_bytes()
}

pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// Three shards and their index.
pub(crate) fn three() -> tempfile::TempDir {
    let pairs = [("k1", "a.safetensors"), ("k2", "b.safetensors"), ("k3", "c.safetensors")];
    let files =
        [("a.safetensors", shard("k1")), ("b.safetensors", shard("k2")), ("c.safetensors", shard("k3"))];
    let all = folder(&files);
    fs::write(all.path().join(INDEX), index(&pairs)).unwrap();
    all
}

pub(crate) fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
    Checkpoint::open(path, &OpenOptions::default())
}

pub(crate) fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors().iter().map(|tensor| tensor.name.as_str()).collect()
}
