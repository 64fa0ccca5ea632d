//! Files that no trainer wrote: what is wrong with each is said of its keys, and nothing of them is applied.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeSet;
use std::path::Path;

use checkpoint::TensorInfo;
use common::{Corpus, File, layer, linear, model, reasons};
use lora_runtime::{AdapterFile, AdapterPlan, Layers, ResolveOptions, resolve};

fn layers() -> Layers {
    model([
        linear("blocks.0.q", 16, 16),
        linear("blocks.0.k", 16, 16),
        linear("blocks.0.kv", 32, 16),
        layer("blocks.0.norm", "norm", &[16], true),
    ])
}

fn plan(name: &str) -> AdapterPlan {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/corpus/hostile/{name}.safetensors"));
    let corpus = Corpus::open(&path);
    let scalar = |tensor: &TensorInfo| (tensor.kind.to_string() == "F32").then(|| corpus.numbers(tensor)[0]);
    let file = AdapterFile::of_checkpoint(&corpus.file, scalar).unwrap();
    let plan = resolve(&layers(), &file, &ResolveOptions::default()).unwrap();
    common::check_whole(&plan, &File { tensors: file.tensors().to_vec(), ..File::default() });
    plan
}

/// Each file, what is said, and how many keys are refused.
const REFUSED: &[(&str, &str, usize)] = &[
    ("huge_rank", "holds no numbers", 2),
    ("rank_0", "holds no numbers", 2),
    ("ranks_differ", "do not belong together", 2),
    ("inputs_differ", "[4, 17]", 2),
    ("outputs_differ", "[17, 4]", 2),
    ("transposed", "[16, 16] fits the linear layer", 2),
    ("no_dimension", "should be a matrix", 2),
    ("many_dimensions", "only adapters of convolutions", 3),
    ("half_a", "no part \"up\"", 1),
    ("half_b", "no part \"down\"", 1),
    ("half_of_many", "no part \"down\"", 1),
    ("lone_alpha", "an alpha without an adapter", 1),
    ("lone_bias", "no part \"down\"", 1),
    ("lone_magnitude", "without its factors", 1),
    ("alpha_nan", "NaN, which is no alpha", 3),
    ("alpha_infinite", "-inf, which is no alpha", 3),
    ("alpha_vector", "should be one number", 3),
    ("integers", "I8 is no type", 2),
    ("twice", "the same part of one layer", 4),
    ("two_adapters", "several adapters", 2),
    ("two_kinds", "several kinds", 4),
    ("two_scopes", "change the same rows", 4),
    ("no_name", "names no layer", 4),
    ("set_weight", "replaces a weight", 1),
    ("quantized_factor", "none of an adapter's", 1),
    ("kronecker_overflow", "holds no numbers", 2),
    ("blocks_of_0", "holds no numbers", 1),
    ("butterfly_too_deep", "a butterfly of 9 stages", 1),
    ("butterfly_of_odd_blocks", "cannot be halved", 1),
];

#[test]
fn what_is_wrong_is_said_of_its_keys() {
    for (name, why, count) in REFUSED {
        let plan = plan(name);
        assert!(reasons(&plan).contains(why), "{name}: {}", plan.report());
        assert_eq!(plan.refused.len(), *count, "{name}: {}", plan.report());
    }
}

#[test]
fn names_of_no_layer_are_absent() {
    for (name, absent) in [("prefixes_only", 4), ("other_letters", 4), ("many_numbers", 2), ("long_names", 2)]
    {
        let plan = plan(name);
        assert_eq!(
            plan.absent.iter().map(|one| one.keys.len()).sum::<usize>(),
            absent,
            "{name}: {}",
            plan.report()
        );
        assert!(plan.refused.is_empty());
    }
}

#[test]
fn a_header_that_is_no_header_is_a_note() {
    for name in ["deep_metadata", "every_field"] {
        let plan = plan(name);
        common::check_applied(&plan);
        assert!(plan.targets.iter().all(|target| (target.scale - 1.0).abs() < f64::EPSILON), "{name}");
        assert!(plan.notes.len() <= 3, "{name}: {:?}", plan.notes);
    }
}

#[test]
fn every_file_is_looked_at() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/hostile");
    let there = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let there: BTreeSet<_> = there
        .filter(|path| path.extension().is_some_and(|extension| extension == "safetensors"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    let others =
        ["prefixes_only", "other_letters", "long_names", "many_numbers", "deep_metadata", "every_field"];
    let seen: BTreeSet<_> = REFUSED.iter().map(|(name, ..)| *name).chain(others).map(str::to_owned).collect();
    assert_eq!(there, seen);
}

#[test]
fn a_rank_that_no_adapter_has_is_named() {
    let rank = 1 << 40;
    let plan = File::default().peft("blocks.0.q", 16, 16, rank).plan(&layers());
    assert!(reasons(&plan).contains("rank is 1099511627776, above 16384"), "{}", plan.report());
    let plan = File::default().peft("blocks.0.q", 16, 16, u64::MAX).plan(&layers());
    assert_eq!((plan.refused.len(), plan.targets.len()), (2, 0));
}
