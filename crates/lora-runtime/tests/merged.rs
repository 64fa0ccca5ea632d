//! Adapters that `LyCORIS` and PEFT wrote, merged here and there.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use common::{Corpus, File, check_applied, check_whole, layer, model};
use lora_runtime::reference::{Values, merged_bias, merged_weight};
use lora_runtime::{AdapterKind, AdapterPlan, Role, resolve};

fn corpus() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/merged");
    let paths = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> =
        paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    paths.sort();
    paths
}

/// What a file's adapters make of a base, a weight or a bias.
fn merged(corpus: &Corpus, plan: &AdapterPlan, layer: &str, bias: bool, base: Vec<f64>, m: f64) -> Vec<f64> {
    let mut merged = base;
    let mut changed = false;
    for target in plan.targets.iter().filter(|target| target.layer == layer) {
        let numbers: BTreeMap<Role, Vec<f64>> = target
            .parts
            .iter()
            .map(|(role, part)| (*role, corpus.numbers(corpus.file.get(&part.key).unwrap())))
            .collect();
        let values: Values<'_> = numbers.iter().map(|(role, numbers)| (*role, numbers.as_slice())).collect();
        let of_bias = target.kind == AdapterKind::DiffBias
            || target.parts.contains_key(&Role::UpBias)
            || target.kind == AdapterKind::Ia3 && target.axis == Some(0);
        if bias && of_bias {
            merged = merged_bias(target, &merged, &values, m).unwrap();
            changed = true;
        } else if !bias && target.kind != AdapterKind::DiffBias {
            merged = merged_weight(target, &merged, &values, m).unwrap();
            changed = true;
        }
    }
    assert!(changed || bias, "nothing changes {layer}");
    merged
}

#[test]
fn what_the_trainers_merge_is_merged() {
    let mut compared = 0;
    for path in corpus() {
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        let corpus = Corpus::open(&path);
        let layers: Vec<(String, String, Vec<u64>, bool)> =
            serde_json::from_str(&corpus.file.metadata()["layers"]).unwrap();
        let layers = model(layers.iter().map(|(name, kind, shape, bias)| layer(name, kind, shape, *bias)));
        let mut file = File { config: corpus.file.metadata().get("config").cloned(), ..File::default() };
        for tensor in corpus.file.tensors().iter().filter(|tensor| !tensor.name.contains("::")) {
            file = file.with(&tensor.name, &tensor.kind.to_string(), &tensor.shape);
            if let [one] = corpus.numbers(tensor)[..] {
                file.scalars.insert(tensor.name.clone(), one);
            }
        }
        let plan = resolve(&layers, &file.made(), &file.options).unwrap();
        check_whole(&plan, &file);
        check_applied(&plan);
        // Rotations are inverted in float32 there, and differences and PEFT's scales of LoHa are rounded to it.
        let tolerance = match name.as_str() {
            name if name.contains("oft") => 2e-6,
            name if name.contains("diff") || name.starts_with("peft_loha") => 1e-7,
            _ => 1e-12,
        };
        for expected in corpus.file.tensors().iter().filter(|tensor| tensor.name.starts_with("merged::")) {
            let [_, what, m] = expected.name.split("::").collect::<Vec<_>>()[..] else { panic!("{name}") };
            let base = corpus.numbers(corpus.file.get(&format!("base::{what}")).unwrap());
            let (layer, part) = what.rsplit_once('.').unwrap();
            let got = merged(&corpus, &plan, layer, part == "bias", base, m.parse().unwrap());
            let expected = corpus.numbers(expected);
            let size = expected.iter().fold(0.0_f64, |max, n| max.max(n.abs()));
            let worst = got.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert_eq!(got.len(), expected.len(), "{name} {what}");
            assert!(worst <= tolerance * size, "{name} {what} at {m}: {worst:e} of {size}");
            compared += 1;
        }
    }
    assert!(compared > 100, "{compared}");
}
