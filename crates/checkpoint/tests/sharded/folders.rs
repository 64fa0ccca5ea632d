//! Folders, lists of files, prefixes, and what is noted of them.

use std::path::PathBuf;

use checkpoint::{Checkpoint, CheckpointError, OpenOptions};

use crate::common::model;
use crate::{INDEX, folder, index, names, open, shard};

#[test]
fn a_folder_is_opened_only_if_it_is_clear_what_it_holds() {
    let candidates = |files: &[(&str, Vec<u8>)]| match open(folder(files).path()) {
        Err(CheckpointError::Ambiguous { candidates, .. }) => candidates,
        other => panic!("{other:?}"),
    };
    let (a, b) = (("a.safetensors", shard("a")), ("b.safetensors", shard("b")));
    assert_eq!(candidates(&[a.clone(), b.clone()]), ["a.safetensors", "b.safetensors"]);
    let second = "diffusion_pytorch_model.safetensors.index.json";
    let both = [(INDEX, index(&[("a", "a.safetensors")])), (second, index(&[("a", "a.safetensors")]))];
    assert_eq!(candidates(&[a.clone(), both[0].clone(), both[1].clone()]), [second, INDEX]);
    assert!(matches!(open(folder(&[("x.txt", vec![])]).path()), Err(CheckpointError::NoModel { .. })));

    let one = folder(&[a.clone(), ("config.json", b"{}".to_vec()), ("._a.safetensors", b"x".to_vec())]);
    assert_eq!(names(&open(one.path()).unwrap()), ["a"]);
    let usual = folder(&[a, ("model.safetensors", shard("m")), b]);
    let model = open(usual.path()).unwrap();
    assert_eq!(names(&model), ["m"]);
    assert!(model.notes()[0].contains("\"a.safetensors\", \"b.safetensors\""));
}

#[test]
fn several_files_are_one_model() {
    let all = folder(&[
        ("a.safetensors", shard("a")),
        ("b.safetensors", shard("b")),
        ("c.safetensors", shard("a")),
    ]);
    let paths = |names: &[&str]| -> Vec<PathBuf> { names.iter().map(|name| all.path().join(name)).collect() };
    let options = OpenOptions::default();
    let model = Checkpoint::open_files(&paths(&["b.safetensors", "a.safetensors"]), &options).unwrap();
    assert_eq!(names(&model), ["b", "a"]);
    let twice = Checkpoint::open_files(&paths(&["a.safetensors", "a.safetensors"]), &options).unwrap();
    assert_eq!((names(&twice).len(), twice.notes().len()), (1, 1));
    let clash = Checkpoint::open_files(&paths(&["a.safetensors", "c.safetensors"]), &options);
    assert!(matches!(clash, Err(CheckpointError::DuplicateTensor { .. })));
    assert!(matches!(open(all.path().join("d.safetensors")), Err(CheckpointError::Io { act: "open", .. })));
}

#[test]
fn metadata_that_disagrees_is_noted() {
    let of = |name, value| model(&[(name, "U8", &[1], 1)], &[("who", value)]);
    let all =
        folder(&[("m-1-of-2.safetensors", of("a", "first")), ("m-2-of-2.safetensors", of("b", "second"))]);
    let model = open(all.path()).unwrap();
    assert_eq!(model.metadata()["who"], "first");
    assert_eq!(model.file_metadata(1).unwrap()["who"], "second");
    assert!(model.notes()[0].contains("\"who\""));
}

#[test]
fn prefixes_choose_tensors_and_leave_their_names_whole() {
    let bytes = model(&[("vae.a", "U8", &[1], 1), ("unet.b", "U8", &[1], 1), ("vae.c", "U8", &[1], 1)], &[]);
    let all = folder(&[("m.safetensors", bytes)]);
    let with = |prefixes: &[&str]| {
        let mut options = OpenOptions::default();
        options.prefixes = prefixes.iter().map(|&prefix| prefix.to_owned()).collect();
        let model = Checkpoint::open(all.path(), &options).unwrap();
        names(&model).join(" ")
    };
    assert_eq!(with(&["vae."]), "vae.a vae.c");
    assert_eq!(with(&["unet.", "vae.c"]), "unet.b vae.c");
    assert_eq!(with(&["x"]), "");
}

#[test]
fn trailing_bytes_are_noted_where_they_are_allowed() {
    let all = folder(&[("m.safetensors", [shard("a"), vec![0; 5]].concat())]);
    assert!(open(all.path()).is_err());
    let mut options = OpenOptions::default();
    options.allow_trailing = true;
    let model = Checkpoint::open(all.path(), &options).unwrap();
    assert!(model.notes()[0].starts_with("5 bytes after the last tensor"));
}

#[test]
fn what_is_no_file_is_an_error() {
    let all = tempfile::tempdir().unwrap();
    assert!(matches!(open(all.path().join("none")), Err(CheckpointError::Io { .. })));
    let pipe = all.path().join("m.safetensors");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, 0o600.into()).unwrap();
    assert!(matches!(open(&pipe), Err(CheckpointError::NotAFile { .. })));
}
