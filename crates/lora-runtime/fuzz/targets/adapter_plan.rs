//! Resolves an adapter file made of the input, one tensor a line: what is applied has parts that fit, and each key has one fate.

use std::collections::HashMap;

use lora_runtime::reference::{Values, merged_bias, merged_weight};
use lora_runtime::{AdapterFile, AdapterKind, AdapterTensor, Layer, Layers, ResolveOptions, Role, resolve};

/// Layers of every kind, some of which are fused elsewhere.
fn layers() -> Option<Layers> {
    let layers: [(&str, &str, &[u64], bool); 10] = [
        ("blocks.0.q", "linear", &[8, 4], true),
        ("blocks.0.k", "linear", &[8, 4], true),
        ("blocks.0.v", "linear", &[8, 4], true),
        ("blocks.1.qkv", "linear", &[24, 4], false),
        ("blocks.10.conv", "conv2d", &[4, 4, 3, 3], true),
        ("blocks.10.short", "conv1d", &[4, 2, 3], true),
        ("blocks.0.norm", "norm", &[4], true),
        ("blocks.0.modulation", "parameter", &[1, 6, 4], false),
        ("norm_out.linear", "linear", &[8, 4], true),
        ("embed", "embedding", &[16, 4], false),
    ];
    let made: Result<Vec<_>, _> = layers
        .iter()
        .map(|(name, kind, shape, bias)| Layer::parse(name, kind, shape.to_vec(), *bias))
        .collect();
    Layers::new(made.ok()?).ok()
}

/// Runs on any input. A line is a key, a type, and numbers: `=` before one makes it the value, others are the shape. The first line
/// may be a configuration in braces.
pub(crate) fn run(input: &[u8]) {
    let Some(layers) = layers() else { return };
    let text = String::from_utf8_lossy(input);
    let (mut tensors, mut scalars, mut config) = (Vec::new(), HashMap::new(), None);
    let mut options = ResolveOptions::default();
    for line in text.lines().take(64) {
        if line.starts_with('{') {
            // The same text as either: both are JSON of a stranger.
            options.split = config.is_some().then(|| line.to_owned());
            config = Some(line.to_owned());
            continue;
        }
        options.ignore_variations |= line == "ignore";
        let mut words = line.split(' ');
        let (Some(key), Some(dtype)) = (words.next(), words.next()) else { continue };
        let mut shape = Vec::new();
        for word in words.take(8) {
            if let Some(value) = word.strip_prefix('=') {
                scalars.extend(value.parse::<f64>().ok().map(|value| (key.to_owned(), value)));
            } else {
                shape.extend(word.parse::<u64>().ok());
            }
        }
        tensors.push(AdapterTensor { key: key.into(), dtype: dtype.into(), shape });
    }
    let metadata = tensors.iter().map(|tensor| (tensor.key.clone(), tensor.dtype.clone())).collect();
    let keys: Vec<_> = tensors.iter().map(|tensor| tensor.key.clone()).collect();
    let Ok(file) = AdapterFile::new(tensors) else { return };
    let file = file.with_scalars(scalars).with_metadata(metadata).with_config(config);
    let Ok(plan) = resolve(&layers, &file, &options) else { return };

    let refused = plan.refused.iter().chain(&plan.skipped).map(|one| one.key.as_str());
    let absent = plan.absent.iter().flat_map(|one| one.keys.iter().map(String::as_str));
    let mut seen: Vec<_> = plan.applied().into_iter().chain(refused).chain(absent).collect();
    seen.sort_unstable();
    let mut keys: Vec<_> = keys.iter().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(seen, keys, "each key is in one list");

    for target in &plan.targets {
        assert!(target.scale.is_finite());
        let count = |shape: &[u64]| shape.iter().product::<u64>() as usize;
        // Ranks are bounded, but a small layer's factors may still be megabytes.
        if target.parts.values().any(|part| count(&part.shape) > 1 << 14) {
            continue;
        }
        let numbers: Vec<(Role, Vec<f64>)> =
            target.parts.iter().map(|(role, part)| (*role, vec![0.25; count(&part.shape)])).collect();
        let values: Values<'_> = numbers.iter().map(|(role, numbers)| (*role, numbers.as_slice())).collect();
        let merged = if target.kind == AdapterKind::DiffBias {
            merged_bias(target, &vec![1.0; target.shape[0] as usize], &values, 0.5)
        } else {
            merged_weight(target, &vec![1.0; count(&target.shape)], &values, 0.5)
        };
        assert!(merged.is_ok(), "{target:?}: {merged:?}");
    }
}
