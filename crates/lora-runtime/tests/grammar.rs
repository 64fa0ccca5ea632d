//! Ten thousand files out of a grammar of spellings and mistakes: each is applied as its plain spelling would be, or what is
//! wrong is refused or absent by name. None is applied by half.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::{BTreeMap, BTreeSet};

use common::{File, layer, linear, model};
use lora_runtime::{AdapterPlan, AdapterTarget, Layers};

const FILES: u64 = 10_000;

/// Random numbers that are always the same ones.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) % sides as u64) as usize
    }

    fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.roll(of.len())]
    }
}

fn layers() -> Layers {
    let mut all = Vec::new();
    for block in [0, 1, 10, 11, 100] {
        all.push(linear(&format!("blocks.{block}.self_attn.q"), 32, 16));
        all.push(linear(&format!("blocks.{block}.ffn.0"), 64, 16));
        all.push(linear(&format!("blocks.{block}.ffn.net.0.proj"), 64, 16));
        all.push(layer(&format!("blocks.{block}.norm-1"), "norm", &[16], true));
        all.push(layer(&format!("blocks.{block}.conv_in"), "conv2d", &[8, 4, 3, 3], true));
    }
    all.push(linear("proj_out", 24, 16));
    model(all)
}

const PREFIXES: &[&str] = &[
    "",
    "transformer.",
    "unet.",
    "diffusion_model.",
    "model.diffusion_model.",
    "base_model.model.",
    "lora_unet_",
    "lora_unet__",
    "lora_transformer_",
    "lycoris_",
    "base_model.model.transformer.",
];

/// The parts of an adapter in the grammar: its plain ending, and shape.
type Parts = Vec<(&'static str, Vec<u64>)>;

/// Adapters that fit a layer.
fn adapters(shape: &[u64], norm: bool) -> Vec<Parts> {
    let (rows, inner) = (shape[0], &shape[1..]);
    if norm {
        return vec![vec![("diff", vec![rows])], vec![("w_norm", vec![rows]), ("b_norm", vec![rows])]];
    }
    let columns: u64 = inner.iter().product();
    let ones = vec![1; inner.len() - 1];
    let lower = [&[4], inner].concat();
    let upper = [&[rows, 4][..], &ones].concat();
    let lora = vec![("lora_down", lower.clone()), ("lora_up", upper.clone())];
    let with = |more: &[(&'static str, Vec<u64>)]| [lora.clone(), more.to_vec()].concat();
    vec![
        lora.clone(),
        with(&[("alpha", vec![])]),
        with(&[("dora_scale", [&[rows, 1][..], &ones].concat())]),
        with(&[("alpha", vec![]), ("dora_scale", [&[1, inner[0]][..], &ones].concat())]),
        with(&[("diff_b", vec![rows])]),
        with(&[("lora_B.bias", vec![rows]), ("alpha", vec![1])]),
        vec![("diff", shape.to_vec())],
        vec![("lokr_w1", vec![4, 2]), ("lokr_w2", vec![rows / 4, columns / 2]), ("alpha", vec![])],
        vec![("lokr_w1", vec![4, 2]), ("lokr_w2_a", vec![rows / 4, 2]), ("lokr_w2_b", vec![2, columns / 2])],
        vec![
            ("hada_w1_a", vec![rows, 3]),
            ("hada_w1_b", vec![3, columns]),
            ("hada_w2_a", vec![rows, 3]),
            ("hada_w2_b", vec![3, columns]),
            ("alpha", vec![]),
        ],
        vec![("oft_blocks", vec![rows / 4, 4, 4]), ("alpha", vec![])],
    ]
}

/// The endings that mean the same as a plain one; `@` is where an adapter's name may stand.
fn endings(plain: &str) -> &'static [&'static str] {
    match plain {
        "lora_down" => &[
            ".lora_down.weight",
            ".lora_A@.weight",
            ".lora_A@",
            ".lora.down.weight",
            ".lora.A.weight",
            "_lora.down.weight",
            ".lora_linear_layer.down.weight",
            ".lora_down",
        ],
        "lora_up" => &[
            ".lora_up.weight",
            ".lora_B@.weight",
            ".lora_B@",
            ".lora.up.weight",
            ".lora.B.weight",
            "_lora.up.weight",
            ".lora_linear_layer.up.weight",
            ".lora_up",
        ],
        "lora_B.bias" => &[".lora_B.bias", ".lora_B@.bias", ".lora_up.bias"],
        "dora_scale" => &[".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector@.weight"],
        "lokr_w1" => &[".lokr_w1", ".lokr_w1@"],
        "lokr_w2" => &[".lokr_w2"],
        "lokr_w2_a" => &[".lokr_w2_a@"],
        "lokr_w2_b" => &[".lokr_w2_b"],
        "hada_w1_a" => &[".hada_w1_a@"],
        "hada_w1_b" => &[".hada_w1_b"],
        "hada_w2_a" => &[".hada_w2_a"],
        "hada_w2_b" => &[".hada_w2_b@"],
        "oft_blocks" => &[".oft_blocks"],
        "alpha" => &[".alpha"],
        "diff" => &[".diff"],
        "diff_b" => &[".diff_b", ".b_norm"],
        "w_norm" => &[".w_norm", ".diff"],
        "b_norm" => &[".b_norm", ".diff_b"],
        other => panic!("{other}"),
    }
}

/// A layer's name with its separators changed one by one.
fn spelled(dice: &mut Dice, name: &str, prefix: &str) -> String {
    let how = dice.roll(3);
    let name = name.chars().map(|c| match c {
        '.' | '_' | '-' if how == 1 => '_',
        '.' | '_' | '-' if how == 2 => *dice.pick(&['.', '_', '-']),
        other => other,
    });
    format!("{prefix}{}", name.collect::<String>())
}

/// One adapter in the making.
struct Written {
    layer: String,
    keys: Vec<(String, &'static str, Vec<u64>)>,
    /// What was done wrong.
    wrong: Option<&'static str>,
}

fn written(dice: &mut Dice, layer: &lora_runtime::Layer, word: &str, prefix: &str) -> Written {
    let norm = layer.shape.len() == 1;
    let parts = dice.pick(&adapters(&layer.shape, norm)).clone();
    let name = spelled(dice, &layer.name, prefix);
    let mut keys: Vec<_> = parts
        .iter()
        .map(|(plain, shape)| {
            // PEFT keeps one number a filter of a convolution where others have one a channel.
            let all = endings(plain);
            let plain_only = *plain == "dora_scale" && layer.shape.len() > 2;
            let ending = if plain_only { all[0] } else { *dice.pick(all) };
            let word = if dice.roll(2) == 0 { String::new() } else { format!(".{word}") };
            (format!("{name}{}", ending.replace('@', &word)), *plain, shape.clone())
        })
        .collect();
    let wrong = (dice.roll(2) == 0).then(|| mistake(dice, &mut keys)).flatten();
    Written { layer: layer.name.clone(), keys, wrong }
}

/// Does something wrong, if it can be done to these keys.
fn mistake(dice: &mut Dice, keys: &mut Vec<(String, &'static str, Vec<u64>)>) -> Option<&'static str> {
    let at = dice.roll(keys.len());
    let paired = !matches!(
        keys[at].1,
        "alpha" | "dora_scale" | "lora_B.bias" | "diff" | "diff_b" | "w_norm" | "b_norm" | "oft_blocks"
    );
    match dice.roll(9) {
        0 if paired => {
            keys.remove(at);
            Some("a part is missing")
        }
        1 if paired => {
            let shape = &mut keys[at].2;
            let last = shape.len() - 1;
            shape[0] += 1;
            shape[last] += 1;
            Some("a part has another shape")
        }
        2 => {
            let (key, plain, shape) = keys[at].clone();
            let inner = ["attn", "ffn", "norm", "conv"].iter().any(|word| key.contains(word));
            let word = if inner { "blocks" } else { "proj" };
            keys.push((key.replacen(word, &format!("_{word}_"), 1), plain, shape));
            Some("a part is there twice")
        }
        3 => {
            keys[at].0 = keys[at]
                .0
                .replace("q.", "qq.")
                .replace("ffn", "ff")
                .replace("norm", "nor")
                .replace("conv", "con")
                .replace("proj", "pro");
            Some("the layer is another")
        }
        4 => {
            keys[at].0.push_str(".what.is.this");
            Some("the ending is none")
        }
        5 if keys[at].0.contains(".lora_A") || keys[at].0.contains(".lora_B") => {
            keys[at].0 = keys[at].0.replace(".lora_A", ".lora_A.x.y").replace(".lora_B", ".lora_B.x.y");
            Some("there are two words")
        }
        6 => {
            keys[at].2.insert(0, 1 << 62);
            Some("a part is huge")
        }
        7 => {
            keys[at].2 = vec![0];
            Some("a part is empty")
        }
        _ => None,
    }
}

fn file(all: &[Written]) -> File {
    let keys = all.iter().flat_map(|one| &one.keys);
    keys.fold(File::default(), |mut file, (key, plain, shape)| {
        if *plain == "alpha" {
            file.scalars.insert(key.clone(), 2.0);
        }
        file.with(key, "F16", shape)
    })
}

/// What a target does, apart from how its keys are spelled.
fn essence(target: &AdapterTarget) -> String {
    let parts: BTreeMap<_, _> =
        target.parts.iter().map(|(role, part)| (role.name(), (&part.shape, &part.rows))).collect();
    let t = target;
    format!(
        "{} {} {parts:?} {:?} {:?} {} {} {:?} {}",
        t.layer,
        t.kind,
        t.rows,
        t.cut,
        t.rank,
        t.scale,
        t.axis,
        t.alpha.is_some()
    )
}

/// The plan of the same adapters, spelled plainly.
fn plain(all: &[Written], layers: &Layers) -> AdapterPlan {
    let name = |one: &Written, plain: &str| match plain {
        "lora_down" | "lora_up" => format!("{}.{plain}.weight", one.layer),
        _ => format!("{}.{plain}", one.layer),
    };
    let keys = |one: &Written| {
        one.keys.iter().map(|(_, plain, shape)| (name(one, plain), *plain, shape.clone())).collect()
    };
    let all: Vec<_> =
        all.iter().map(|one| Written { layer: one.layer.clone(), keys: keys(one), wrong: None }).collect();
    file(&all).plan(layers)
}

#[test]
fn nothing_is_applied_by_half() {
    let layers = layers();
    let every: Vec<_> = layers.iter().cloned().collect();
    let mut counts: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for number in 0..FILES {
        let mut dice = Dice(number);
        let word = *dice.pick(&["default", "default_0", "my-style", "a", "v1"]);
        let prefix = *dice.pick(PREFIXES);
        let mut names = BTreeSet::new();
        let mut all = Vec::new();
        for _ in 0..=dice.roll(3) {
            let layer = dice.pick(&every);
            if names.insert(layer.name.clone()) {
                all.push(written(&mut dice, layer, word, prefix));
            }
        }
        let file = file(&all);
        let distinct: BTreeSet<_> = file.tensors.iter().map(|tensor| &tensor.key).collect();
        if distinct.len() < file.tensors.len() {
            continue; // A key that is twice in a header is no file.
        }
        let plan = file.plan(&layers);
        let applied: BTreeSet<_> = plan.applied().into_iter().collect();
        let right: Vec<_> = all.iter().filter(|one| one.wrong.is_none()).collect();
        if right.len() == all.len() {
            common::check_applied(&plan);
            let (mut got, mut expected): (Vec<_>, Vec<_>) = (
                plan.targets.iter().map(essence).collect(),
                plain(&all, &layers).targets.iter().map(essence).collect(),
            );
            got.sort();
            expected.sort();
            assert_eq!(got, expected, "{:#?}", file.tensors);
        }
        for one in all.iter().filter(|one| one.wrong.is_some()) {
            let count = counts.entry(one.wrong.unwrap()).or_default();
            let hit = one.keys.iter().filter(|(key, ..)| applied.contains(key.as_str())).count();
            // Applied as a whole it was no mistake, or else somebody is told.
            let told = !plan.refused.is_empty() || !plan.absent.is_empty();
            assert!(hit == one.keys.len() || told, "{:?}: {:#?}\n{}", one.wrong, file.tensors, plan.report());
            *count = (count.0 + 1, count.1 + u64::from(hit == one.keys.len()));
        }
        // What was refused is refused for its whole layer.
        for one in all.iter().filter(|one| {
            one.wrong != Some("the ending is none") && one.wrong != Some("the layer is another")
        }) {
            let refused =
                one.keys.iter().filter(|(key, ..)| plan.refused.iter().any(|r| r.key == *key)).count();
            let whole = one.keys.len();
            let words = one.wrong == Some("there are two words");
            let apart = one.keys.iter().any(|(_, plain, _)| matches!(*plain, "diff_b" | "b_norm"));
            assert!(
                words || apart || refused == 0 || refused == whole,
                "{}\n{:#?}",
                plan.report(),
                file.tensors
            );
        }
    }
    assert!(counts.len() >= 7, "{counts:?}");
    for (wrong, (count, applied)) in counts {
        assert!(count > 50, "{wrong}: {count}");
        // A part that is missing from an adapter of another kind may leave one; nothing else is applied.
        assert!(applied * 20 <= count, "{wrong}: {applied} of {count} applied");
    }
}
