//! Shards that are numbered by name, and models cut into them at random.

use std::fs;
use std::path::Path;

use checkpoint::{Checkpoint, CheckpointError, Foreign, OpenOptions};
use proptest::prelude::*;

use crate::common::{self, model};
use crate::{INDEX, folder, index, names, open, shard, three};

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

/// Everything a model says of its tensors, and their bytes, whatever file they are in.
fn content(model: &Checkpoint) -> Vec<(String, String, Vec<u64>, Vec<u8>)> {
    let mut all: Vec<_> = model
        .tensors()
        .iter()
        .map(|tensor| {
            let mut bytes = vec![0; usize::try_from(tensor.bytes()).unwrap()];
            model.file_of(tensor).unwrap().read_exact_at(tensor.range.start, &mut bytes).unwrap();
            (tensor.name.clone(), tensor.kind.to_string(), tensor.shape.clone(), bytes)
        })
        .collect();
    all.sort();
    all
}

/// A file of tensors `(name, length)`, each filled with a byte of its own.
fn filled(tensors: &[(String, u64)]) -> Vec<u8> {
    let (mut entries, mut data) = (Vec::new(), Vec::new());
    for (name, length) in tensors {
        let start = data.len() as u64;
        data.extend(std::iter::repeat_n(name.bytes().last().unwrap(), usize::try_from(*length).unwrap()));
        entries.push(common::entry(name, "U8", &[*length], start, start + length));
    }
    common::file(format!("{{{}}}", entries.join(",")), &data)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    /// However a model is cut into shards, it is the same model: by its index, by any shard's name, by a list of files.
    #[test]
    fn cutting_a_model_into_shards_changes_nothing(lengths in prop::collection::vec((0_u64..40, 0_usize..11), 11..40)) {
        let tensors: Vec<_> = (0..).zip(&lengths).map(|(i, (length, _))| (format!("layer.{i}"), *length)).collect();
        let whole = folder(&[("model.safetensors", filled(&tensors))]);
        let whole = content(&open(whole.path()).unwrap());

        let all = tempfile::tempdir().unwrap();
        let name = |shard: usize| format!("model-{:05}-of-00011.safetensors", shard + 1);
        let mut pairs = Vec::new();
        for shard in 0..11 {
            // One tensor each, so that none is empty, and the others as it falls.
            let of = |i: usize| if i < 11 { i } else { lengths[i].1 };
            let own: Vec<_> = (0..tensors.len()).filter(|i| of(*i) == shard).map(|i| tensors[i].clone()).collect();
            fs::write(all.path().join(name(shard)), filled(&own)).unwrap();
            pairs.extend(own.into_iter().map(|(tensor, _)| (tensor, name(shard))));
        }
        let files: Vec<_> = (0..11).rev().map(|shard| all.path().join(name(shard))).collect();
        prop_assert_eq!(&content(&open(&files[3]).unwrap()), &whole);
        let mut exact = OpenOptions::default();
        exact.exact_files = true;
        prop_assert_eq!(&content(&Checkpoint::open_files(&files, &exact).unwrap()), &whole);
        let pairs: Vec<_> = pairs.iter().map(|(tensor, file)| (tensor.as_str(), file.as_str())).collect();
        fs::write(all.path().join(INDEX), index(&pairs)).unwrap();
        prop_assert_eq!(&content(&open(all.path()).unwrap()), &whole);
    }
}
