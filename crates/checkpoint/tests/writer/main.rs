//! Writing safetensors files: read by the official library and by ours, laid out as promised, whole or not at all.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a failure is the test's")]

mod layout;
mod refusals;
mod whole;

use std::collections::BTreeMap;
use std::path::Path;

use checkpoint::WriteOptions;

/// Options with this metadata and the smallest alignment.
fn plain(metadata: &[(&str, &str)]) -> WriteOptions {
    let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    WriteOptions { metadata: metadata.collect::<BTreeMap<_, _>>(), alignment: 1, ..WriteOptions::default() }
}

/// The names in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}
