//! Models in several files: indexes, numbered shards, folders, lists of files, and everything that can be wrong with them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, CheckpointError, Foreign, IndexProblem, OpenOptions, Result};
use common::model;

/// One tensor of four bytes.
fn shard(name: &str) -> Vec<u8> {
    model(&[(name, "F32", &[1], 4)], &[("format", "pt")])
}

fn folder(files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn index(pairs: &[(&str, &str)]) -> Vec<u8> {
    let pairs: Vec<_> = pairs.iter().map(|(tensor, file)| format!("{tensor:?}:{file:?}")).collect();
    format!("{{\"metadata\":{{\"total_size\":12}},\"weight_map\":{{{}}}}}", pairs.join(",")).into_bytes()
}

const INDEX: &str = "model.safetensors.index.json";

/// Three shards and their index.
fn three() -> tempfile::TempDir {
    let pairs = [("k1", "a.safetensors"), ("k2", "b.safetensors"), ("k3", "c.safetensors")];
    let files =
        [("a.safetensors", shard("k1")), ("b.safetensors", shard("k2")), ("c.safetensors", shard("k3"))];
    let all = folder(&files);
    fs::write(all.path().join(INDEX), index(&pairs)).unwrap();
    all
}

fn open(path: impl AsRef<Path>) -> Result<Checkpoint> {
    Checkpoint::open(path, &OpenOptions::default())
}

fn names(checkpoint: &Checkpoint) -> Vec<&str> {
    checkpoint.tensors().iter().map(|tensor| tensor.name.as_str()).collect()
}

fn index_problem(path: impl AsRef<Path>) -> IndexProblem {
    match open(path) {
        Err(CheckpointError::Index { problem, .. }) => *problem,
        other => panic!("no problem of an index: {other:?}"),
    }
}

#[test]
fn an_index_and_its_folder_open_the_same_model() {
    for name in [INDEX, "diffusion_pytorch_model.safetensors.index.json", "my.fp8.safetensors.index.json"] {
        let all = three();
        fs::rename(all.path().join(INDEX), all.path().join(name)).unwrap();
        for path in [all.path().to_owned(), all.path().join(name)] {
            let model = open(path).unwrap();
            assert_eq!(names(&model), ["k1", "k2", "k3"]);
            assert_eq!((model.files().len(), model.bytes(), model.notes()), (3, 12, &[][..]));
            assert_eq!(model.metadata()["format"], "pt");
            let tensor = model.get("k3").unwrap();
            assert!(model.file_of(tensor).unwrap().path().ends_with("c.safetensors"));
            assert!(model.get("k4").is_none());
        }
    }
}

#[test]
fn missing_files_of_an_index_are_all_named() {
    let all = three();
    fs::remove_file(all.path().join("b.safetensors")).unwrap();
    match index_problem(all.path()) {
        IndexProblem::Missing { missing, named: 3 } => assert_eq!(missing, ["b.safetensors"]),
        other => panic!("{other}"),
    }
    for name in ["a", "c"] {
        fs::remove_file(all.path().join(format!("{name}.safetensors"))).unwrap();
    }
    let text = open(all.path()).unwrap_err().to_string();
    assert!(text.contains("3 of the 3 files") && text.contains("\"c.safetensors\""), "{text}");
}

#[test]
fn a_stray_copy_of_the_model_is_left_out_and_said_to_be() {
    let all = three();
    let stray = model(&[("k1", "I8", &[1], 1), ("k2", "I8", &[1], 1), ("k3", "I8", &[1], 1)], &[]);
    fs::write(all.path().join("model.safetensors"), stray).unwrap();
    let model = open(all.path()).unwrap();
    assert!(model.tensors().iter().all(|tensor| tensor.kind.to_string() == "F32"));
    assert!(model.notes()[0].contains("\"model.safetensors\""), "{:?}", model.notes());
}

#[test]
fn a_tensor_that_is_not_where_the_index_says_is_named_with_both_files() {
    let all = three();
    let pairs =
        [("k1", "a.safetensors"), ("k2", "c.safetensors"), ("k3", "c.safetensors"), ("k4", "b.safetensors")];
    fs::write(all.path().join(INDEX), index(&pairs)).unwrap();
    match index_problem(all.path()) {
        IndexProblem::NotInFile { tensor, file, found } => {
            assert_eq!(
                (tensor.as_str(), file.as_str(), found.as_deref()),
                ("k2", "c.safetensors", Some("b.safetensors"))
            );
        }
        other => panic!("{other}"),
    }
    fs::write(all.path().join(INDEX), index(&[pairs[0], pairs[3]])).unwrap();
    assert!(matches!(index_problem(all.path()), IndexProblem::NotInFile { found: None, .. }));
}

#[test]
fn a_tensor_in_two_shards_is_refused_whatever_the_index_says() {
    let all = three();
    let both = model(&[("k3", "F32", &[1], 4), ("k2", "F32", &[1], 4)], &[]);
    fs::write(all.path().join("c.safetensors"), both).unwrap();
    match open(all.path()) {
        Err(CheckpointError::DuplicateTensor { tensor, first, second }) => {
            assert_eq!(tensor, "k2");
            assert!(first.ends_with("b.safetensors") && second.ends_with("c.safetensors"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensors_and_totals_the_index_is_wrong_about_are_noted() {
    let all = three();
    fs::write(all.path().join(INDEX), index(&[("k1", "a.safetensors"), ("k3", "c.safetensors")])).unwrap();
    let more = model(&[("k3", "F32", &[1], 4), ("extra", "F32", &[1], 4)], &[]);
    fs::write(all.path().join("c.safetensors"), more).unwrap();
    // Two tensors are listed, a third is not; the total of 12 bytes agrees, and `b` is a stray.
    let model = open(all.path()).unwrap();
    assert_eq!(names(&model), ["k1", "k3", "extra"]);
    let notes = model.notes().join("\n");
    assert!(
        notes.contains("were kept: 1, the first \"extra\" in \"c.safetensors\"")
            && notes.contains("\"b.safetensors\"")
    );
    fs::write(all.path().join("c.safetensors"), shard("k3")).unwrap();
    assert!(open(all.path()).unwrap().notes().join("\n").contains("12 bytes; they have 8"));
}

#[test]
fn names_that_leave_the_folder_are_refused_before_they_become_paths() {
    for bad in [
        "../x.safetensors",
        "/etc/passwd",
        "sub/x.safetensors",
        "..",
        "",
        "a\u{0}b",
        "..\\x",
        "C:x",
        "a/../b",
    ] {
        let all = folder(&[(
            INDEX,
            format!("{{\"weight_map\":{{\"k\":{}}}}}", serde_json::json!(bad)).into_bytes(),
        )]);
        match index_problem(all.path()) {
            IndexProblem::Outside { tensor, file, .. } => {
                assert_eq!((tensor.as_str(), file.as_str()), ("k", bad));
            }
            other => panic!("{bad}: {other}"),
        }
    }
}

#[test]
fn a_link_out_of_the_folder_is_refused_and_one_inside_is_not() {
    let outside = folder(&[("real.safetensors", shard("k1"))]);
    let all = three();
    let link = all.path().join("a.safetensors");
    fs::remove_file(&link).unwrap();
    symlink(outside.path().join("real.safetensors"), &link).unwrap();
    assert!(matches!(index_problem(all.path()), IndexProblem::Escapes { file } if file == "a.safetensors"));

    fs::remove_file(&link).unwrap();
    fs::create_dir(all.path().join("store")).unwrap();
    fs::write(all.path().join("store/1"), shard("k1")).unwrap();
    symlink("store/1", &link).unwrap();
    assert_eq!(names(&open(all.path()).unwrap()), ["k1", "k2", "k3"]);

    // A link to nothing is a file that is missing.
    fs::remove_file(all.path().join("store/1")).unwrap();
    assert!(matches!(index_problem(all.path()), IndexProblem::Missing { .. }));
}

#[test]
fn the_hubs_cache_is_a_folder_of_links_into_its_blobs() {
    let cache = tempfile::tempdir().unwrap();
    let (snapshot, blobs) = (cache.path().join("snapshots/abc"), cache.path().join("blobs"));
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir(&blobs).unwrap();
    for (name, blob, bytes) in
        [("a.safetensors", "1", shard("k1")), (INDEX, "2", index(&[("k1", "a.safetensors")]))]
    {
        fs::write(blobs.join(blob), bytes).unwrap();
        symlink(Path::new("../../blobs").join(blob), snapshot.join(name)).unwrap();
    }
    assert_eq!(names(&open(&snapshot).unwrap()), ["k1"]);
    // Only blobs: not what lies beside them.
    fs::write(cache.path().join("other"), shard("k1")).unwrap();
    fs::remove_file(snapshot.join("a.safetensors")).unwrap();
    symlink("../../other", snapshot.join("a.safetensors")).unwrap();
    assert!(matches!(index_problem(&snapshot), IndexProblem::Escapes { .. }));
}

#[test]
fn broken_indexes_each_have_their_message() {
    let cases: [(&str, &str); 14] = [
        ("", "empty"),
        ("[]", "no JSON object"),
        ("{}", "no `weight_map`"),
        (r#"{"weight_map":[]}"#, "`weight_map` is no object"),
        (r#"{"weight_map":{}}"#, "names no tensor"),
        (r#"{"weight_map":{"a":1}}"#, "other than a file's name"),
        (r#"{"weight_map":{"a":"x","a":"x"}}"#, "the tensor \"a\" twice"),
        (r#"{"weight_map":{"a":"x","\u0061":"y"}}"#, "the tensor \"a\" twice"),
        (r#"{"weight_map":{"a":"x"},"weight_map":{}}"#, "two `weight_map`s"),
        (r#"{"weight_map":{"a":"x"}} x"#, "follows the end"),
        (r#"{"weight_map":{"a":"x"}"#, "the text ends there"),
        ("{\"weight_map\":{\"\u{1}\":\"x\"}}", "control character"),
        ("\u{feff}{}", "is not ASCII"),
        (
            r#"{"weight_map":{"a":"x"},"b":[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["#,
            "nesting",
        ),
    ];
    for (text, wanted) in cases {
        let all = folder(&[(INDEX, text.as_bytes().to_vec())]);
        let found = index_problem(all.path()).to_string();
        assert!(found.contains(wanted), "{text}: {found}");
    }
    for (text, kind) in
        [("<!DOCTYPE html>", Foreign::Page), ("version https://git-lfs", Foreign::LfsPointer { size: None })]
    {
        let all = folder(&[(INDEX, text.as_bytes().to_vec())]);
        assert!(
            matches!(open(all.path()), Err(CheckpointError::Foreign { kind: found, .. }) if found == kind)
        );
    }
    let all = folder(&[(INDEX, b"{\"weight_map\":{\"\xFF\":\"x\"}}".to_vec())]);
    assert!(matches!(index_problem(all.path()), IndexProblem::NotUtf8 { at: 16 }));
}

fn numbered(
    numbers: std::ops::RangeInclusive<usize>,
    count: usize,
    name: fn(usize, usize) -> String,
) -> tempfile::TempDir {
    let all = tempfile::tempdir().unwrap();
    for number in numbers {
        let bytes =
            model(&[(&format!("t{number:03}"), "U8", &[1], 1)], &[(&format!("key{number}"), "value")]);
        fs::write(all.path().join(name(number, count)), bytes).unwrap();
    }
    all
}

#[test]
fn any_shard_opens_all_of_them_in_order() {
    let forms: [fn(usize, usize) -> String; 4] = [
        |n, of| format!("model-{n:05}-of-{of:05}.safetensors"),
        |n, of| format!("my-fine-model-v2-{n}-of-{of}.safetensors"),
        |n, of| format!("model.fp16-{n:05}-of-{of:05}.safetensors"),
        |n, of| format!("model-{n:05}-of-{of:05}.fp8-e4m3.safetensors"),
    ];
    for form in forms {
        let all = numbered(1..=12, 12, form);
        for opened in [1, 9, 10, 12] {
            let model = open(all.path().join(form(opened, 12))).unwrap();
            let wanted: Vec<_> = (1..=12).map(|n| format!("t{n:03}")).collect();
            assert_eq!(names(&model), wanted);
            assert_eq!(model.metadata().len(), 12);
            assert_eq!(model.file_metadata(9).unwrap()["key10"], "value");
        }
        assert_eq!(names(&open(all.path()).unwrap()).len(), 12);
    }
}

#[test]
fn exactly_the_named_files_are_opened_if_asked_for() {
    let form = |n, of| format!("m-{n:05}-of-{of:05}.safetensors");
    let all = numbered(1..=3, 3, form);
    let mut options = OpenOptions::default();
    options.exact_files = true;
    let exact = |path: &Path| Checkpoint::open(path, &options);
    assert_eq!(names(&exact(&all.path().join(form(2, 3))).unwrap()), ["t002"]);
    assert!(matches!(exact(all.path()), Err(CheckpointError::NotAFile { .. })));
    let indexed = three();
    assert!(matches!(
        exact(&indexed.path().join(INDEX)),
        Err(CheckpointError::Foreign { kind: Foreign::Json, .. })
    ));
}

#[test]
fn shards_may_count_from_zero_and_must_be_complete() {
    let form = |n, of| format!("m-{n:05}-of-{of:05}.safetensors");
    let all = numbered(0..=2, 3, form);
    assert_eq!(open(all.path().join(form(1, 3))).unwrap().tensors().len(), 3);

    let all = numbered(1..=12, 12, form);
    fs::remove_file(all.path().join(form(3, 12))).unwrap();
    fs::remove_file(all.path().join(form(11, 12))).unwrap();
    match open(all.path().join(form(1, 12))) {
        Err(CheckpointError::MissingShards { missing, count: 12, .. }) => {
            assert_eq!(missing, [form(3, 12), form(11, 12)]);
        }
        other => panic!("{other:?}"),
    }
    let all = numbered(0..=3, 3, form);
    assert!(matches!(open(all.path().join(form(1, 3))), Err(CheckpointError::ShardNumber { count: 3, .. })));
    let all = numbered(1..=2, 2, form);
    fs::write(all.path().join("m-1-of-00002.safetensors"), shard("x")).unwrap();
    assert!(matches!(open(all.path().join(form(1, 2))), Err(CheckpointError::SameShard { number: 1, .. })));
    let all = folder(&[("m-1-of-99999999999999999999.safetensors", shard("x"))]);
    assert!(matches!(open(all.path()), Err(CheckpointError::TooManyFiles { .. })));
}

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
