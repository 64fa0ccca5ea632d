//! The files of `corpus/safetensors`, which its `make.py` writes: each hostile one is refused with a message of its own, each
//! odd but legal one is read. The messages are kept beside this test, to be read by people.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, OpenOptions};

fn corpus(folder: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/safetensors").join(folder)
}

/// The entries of a folder, by name without ending.
fn entries(folder: &str) -> BTreeMap<String, PathBuf> {
    let entries = fs::read_dir(corpus(folder)).unwrap().map(|entry| entry.unwrap().path());
    let entries: BTreeMap<_, _> =
        entries.map(|path| (path.file_stem().unwrap().to_str().unwrap().to_owned(), path)).collect();
    assert!(!entries.is_empty());
    entries
}

/// What opening something says, with the folder left out of it.
fn message(path: &Path) -> Result<Checkpoint, String> {
    let here = format!("{}/", path.parent().unwrap().display());
    Checkpoint::open(path, &OpenOptions::default()).map_err(|error| error.to_string().replace(&here, ""))
}

#[test]
fn hostile_files_are_refused_each_with_its_own_message() {
    let mut messages = String::new();
    let mut seen = BTreeMap::new();
    let mut clashes = Vec::new();
    for (name, path) in entries("refused") {
        let text = match message(&path) {
            Err(text) => text,
            Ok(model) => panic!("{name} was accepted: {:?}", model.tensors()),
        };
        // Without the file's name, which would make any two messages different.
        let bare = text.replace(&format!("{name}.safetensors"), "");
        assert_ne!(bare, text, "the message does not name the file: {text}");
        let other = seen.insert(bare, name.clone());
        clashes.extend(other.map(|other| format!("{name} and {other} have one message: {text}")));
        writeln!(messages, "{text}").unwrap();
    }
    assert!(clashes.is_empty(), "{clashes:#?}");
    insta::assert_snapshot!("refused", messages);
}

#[test]
fn odd_but_legal_files_are_read() {
    for (name, path) in entries("accepted") {
        let model = message(&path).unwrap_or_else(|error| panic!("{name}: {error}"));
        // Every byte of data is some tensor's.
        let covered: u64 = model.tensors().iter().map(checkpoint::TensorInfo::bytes).sum();
        let first =
            model.tensors().iter().map(|tensor| tensor.range.start).min().unwrap_or(model.files()[0].size());
        assert_eq!(first + covered, model.files()[0].size(), "{name}");
    }
    let misaligned = |name: &str| {
        let model = message(&corpus("accepted").join(name)).unwrap();
        let wrong = model.tensors().iter().filter(|tensor| !tensor.is_aligned());
        wrong.map(|tensor| tensor.name.clone()).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(misaligned("misaligned-header.safetensors"), "f32 bf16 i64");
    assert_eq!(misaligned("misaligned-behind-a-byte.safetensors"), "f32");
    assert_eq!(misaligned("scalar-and-rank-8.safetensors"), "");
}

#[test]
fn indexes_that_are_wrong_say_how() {
    let mut messages = String::new();
    let mut seen = BTreeMap::new();
    for (name, path) in entries("index") {
        let text = match message(&path) {
            Ok(model) => {
                assert_eq!((model.tensors().len(), model.bytes()), (6, 24), "{name}");
                assert!(model.tensors().iter().all(|tensor| tensor.kind.to_string() == "BF16"), "{name}");
                format!("read; notes: {:?}", model.notes())
                    .replace(&corpus("index").display().to_string(), "")
            }
            Err(text) => text,
        };
        let bare = text.replace(&name, "");
        if let Some(other) = seen.insert(bare, name.clone()) {
            assert!(name.starts_with("good"), "{name} and {other} have one message: {text}");
        }
        writeln!(messages, "{name}: {text}").unwrap();
    }
    insta::assert_snapshot!("index", messages);
}

#[test]
fn the_files_are_those_that_the_script_makes() {
    let script = corpus("make.py");
    let output = std::process::Command::new("python3").arg(script).arg("--check").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}
