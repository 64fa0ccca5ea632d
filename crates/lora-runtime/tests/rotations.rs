//! PEFT's rotations of filters and of embeddings, and constrained ones: what is applied, what is refused, and the numbers; and scales
//! that no layer multiplies by.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeMap;

use common::{File, check_applied, layer, linear, model, reasons};
use lora_runtime::reference::{Values, merged_weight};
use lora_runtime::{Layers, ResolveOptions, Role};

const OFT: &str = r#"{"peft_type": "OFT", "use_cayley_neumann": false}"#;

/// Tensors of a file: keys and shapes.
type Tensors<'a> = &'a [(&'a str, &'a [u64])];

fn layers() -> Layers {
    model([
        linear("line", 12, 8),
        layer("point", "conv2d", &[6, 8, 1, 1], true),
        layer("same", "conv2d", &[4, 4, 3, 3], true),
        layer("wide", "conv2d", &[4, 4, 3, 1], true),
        layer("short", "conv1d", &[4, 4, 3], true),
        layer("embed", "embedding", &[10, 6], false),
        layer("square", "embedding", &[6, 6], false),
    ])
}

fn file(config: &str, tensors: Tensors<'_>) -> File {
    let file = File { config: (!config.is_empty()).then(|| config.to_owned()), ..File::default() };
    tensors.iter().fold(file, |file, (key, shape)| file.with(key, "F32", shape))
}

#[test]
fn what_no_trainer_computes_or_two_do_is_refused() {
    let constrained = |eps: &str| format!(r#"{{"peft_type": "OFT", "coft": true, "eps": {eps}}}"#);
    let bad = [constrained("\"much\""), constrained("-1"), constrained("null"), constrained("1e400")];
    let boft = r#"{"peft_type": "BOFT", "coft": true}"#;
    let of_boft: Tensors<'_> = &[("line.boft_R", &[1, 2, 4, 4]), ("line.boft_s", &[12, 1])];
    let mut cases: Vec<(&str, Tensors<'_>, &str)> = vec![
        ("", &[("point.oft_R.weight", &[2, 6])], "says that PEFT made it"),
        (OFT, &[("same.oft_R.weight", &[9, 6])], "puts back elsewhere"),
        ("", &[("same.oft_R.weight", &[9, 6])], "puts back elsewhere"),
        (OFT, &[("same.oft_R.weight", &[1, 28])], "[4, 28] fits"),
        (OFT, &[("wide.oft_R.weight", &[3, 6])], "square filters in two dimensions alone"),
        (OFT, &[("short.oft_R.weight", &[3, 6])], "square filters in two dimensions alone"),
        (OFT, &[("wide.oft_r", &[3, 4, 4]), ("wide.oft_s", &[4, 1])], "square filters"),
        (boft, of_boft, "has not for butterflies"),
        (OFT, &[("line.oft_embedding_R.weight", &[2, 6])], "it is for an embedding"),
        (OFT, &[("embed.oft_R.weight", &[2, 3])], "takes low-rank adapters, rotations"),
        (OFT, &[("embed.oft_embedding_R.weight", &[2, 6])], "[1, 6] fits"),
        (OFT, &[("embed.oft_embedding_R.weight", &[2, 4])], "none of rotations"),
        (OFT, &[("embed.oft_embedding_R.weight", &[6])], "none of rotations"),
        (
            "",
            &[
                ("embed.lora_embedding_A", &[2, 10]),
                ("embed.lora_embedding_B", &[6, 2]),
                ("embed.dora_scale", &[1, 6]),
            ],
            "as LyCORIS spells it",
        ),
        (
            "",
            &[
                ("embed.lora_embedding_A", &[2, 10]),
                ("embed.lora_embedding_B", &[6, 2]),
                ("embed.lora_magnitude_vector", &[10]),
            ],
            "[6] fits",
        ),
        ("", &[("embed.lora_magnitude_vector", &[6])], "without its factors"),
    ];
    cases.extend(bad.iter().map(|config| {
        let of_line: Tensors<'_> = &[("line.oft_R.weight", &[2, 6])];
        (config.as_str(), of_line, "from 0 up")
    }));
    for (config, tensors, words) in cases {
        if config.contains("1e400") {
            // No JSON has such a number.
            assert!(
                lora_runtime::resolve(&layers(), &file(config, tensors).made(), &ResolveOptions::default())
                    .is_err()
            );
            continue;
        }
        let plan = file(config, tensors).plan(&layers());
        assert!(plan.targets.is_empty() && reasons(&plan).contains(words), "{words}: {}", plan.report());
    }
}

#[test]
fn a_magnitude_of_an_embedding_is_of_its_columns_also_where_it_is_square() {
    let tensors: Tensors<'_> = &[
        ("square.lora_embedding_A", &[2, 6]),
        ("square.lora_embedding_B", &[6, 2]),
        ("square.lora_magnitude_vector", &[6]),
    ];
    let plan = file("", tensors).plan(&layers());
    check_applied(&plan);
    assert_eq!(plan.targets[0].axis, Some(1));
}

#[test]
fn constraints_follow_each_version_of_peft() {
    let config = r#"{"peft_type": "OFT", "coft": true, "eps": 0.5}"#;
    let cases: [(Tensors<'_>, f64); 5] = [
        (&[("line.oft_R.weight", &[2, 6])], 0.5 / 2_f64.sqrt()),
        (&[("line.oft_R.weight", &[1, 6])], 0.5),
        (&[("embed.oft_embedding_R.weight", &[2, 3])], 0.5 / 2_f64.sqrt()),
        // Two blocks of inputs, of outputs six each; then three blocks of outputs.
        (&[("line.oft_r", &[2, 4, 4]), ("line.oft_s", &[12, 1])], 0.5 * 36.0 / 2_f64.sqrt()),
        (&[("line.oft_r", &[3, 4, 4])], 0.5 * 16.0 / 3_f64.sqrt()),
    ];
    for (tensors, bound) in cases {
        let plan = file(config, tensors).plan(&layers());
        check_applied(&plan);
        let found = plan.targets[0].constraint.unwrap();
        assert!((found - bound).abs() < 1e-12, "{found} and {bound}");
        let free = file(OFT, tensors).plan(&layers());
        assert_eq!(free.targets[0].constraint, None);
    }
    let usual = file(r#"{"peft_type": "OFT", "coft": true}"#, cases[1].0).plan(&layers());
    assert_eq!(usual.targets[0].constraint, Some(6e-5));
}

#[test]
fn a_block_shorter_than_its_constraint_is_left_as_it_is() {
    let config = r#"{"peft_type": "OFT", "coft": true, "eps": 0.4, "use_cayley_neumann": false}"#;
    let tensors: Tensors<'_> = &[("line.oft_R.weight", &[4, 1])];
    let merged = |config: &str, numbers: [f64; 4]| {
        let plan = file(config, tensors).plan(&layers());
        let values: Values<'_> = BTreeMap::from([(Role::PackedBlocks, &numbers[..])]);
        let weight: Vec<_> = (0..96).map(|n| f64::from(n % 7) - 3.0).collect();
        merged_weight(&plan.targets[0], &weight, &values, 1.0).unwrap()
    };
    // Of four blocks none may be longer than 0.2, which is a number of 0.2 / √2 beside the diagonal, twice.
    let edge = 0.2 / 2_f64.sqrt();
    let (got, free) = (merged(config, [0.1, 0.5, -3.0, 0.0]), merged(OFT, [0.1, edge, -edge, 0.0]));
    assert!(got.iter().zip(&free).all(|(a, b)| (a - b).abs() < 1e-12));
    assert_eq!(merged(config, [0.1, 0.02, 0.0, -0.1]), merged(OFT, [0.1, 0.02, 0.0, -0.1]));
}

#[test]
fn a_scale_that_float32_does_not_hold_is_refused() {
    let tensors: Tensors<'_> =
        &[("line.lora_down.weight", &[2, 8]), ("line.lora_up.weight", &[12, 2]), ("line.alpha", &[])];
    for (alpha, fits) in [(6e38, true), (8e38, false), (-1e300, false)] {
        let mut file = file("", tensors);
        file.scalars.insert("line.alpha".into(), alpha);
        let plan = file.plan(&layers());
        assert_eq!(plan.refused.is_empty(), fits, "{alpha}: {}", plan.report());
        assert!(fits || reasons(&plan).contains("too large for float32"));
    }
}
