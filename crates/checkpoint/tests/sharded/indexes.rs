//! Indexes against what is there, both ways, and names in them that lead elsewhere.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use checkpoint::{CheckpointError, Foreign, IndexProblem};

use crate::common::model;
use crate::{INDEX, folder, index, names, open, shard, three};

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
