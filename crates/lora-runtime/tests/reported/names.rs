//! Names: separators, prefixes, adapter names within keys.

use lora_runtime::{Layer, Layers};

use crate::common::{File, check_applied, linear, model, reasons};
use crate::{change, orders, product};

/// Wan's blocks, tiny; also blocks whose numbers begin with others'.
fn wan(blocks: &[u64]) -> Layers {
    let mut layers: Vec<Layer> = Vec::new();
    for block in blocks {
        for attention in ["self_attn", "cross_attn"] {
            layers.extend(
                "qkvo".chars().map(|part| linear(&format!("blocks.{block}.{attention}.{part}"), 32, 32)),
            );
        }
        layers.push(linear(&format!("blocks.{block}.ffn.0"), 64, 32));
        layers.push(linear(&format!("blocks.{block}.ffn.2"), 32, 64));
    }
    model(layers)
}

/// A Wan `LoRA` with half of its dots turned to underscores: <https://github.com/kijai/ComfyUI-WanVideoWrapper/issues/869>
#[test]
fn dots_and_underscores_are_one_name() {
    let spellings = [
        "lora_unet_blocks_1.self_attn.k",
        "lora_unet_blocks_1_self_attn_k",
        "lora_unet__blocks_1_self_attn_k",
        "lora_unet_blocks.1_self_attn.k",
    ];
    let kohya = spellings.map(|name| File::default().kohya(name, 32, 32, 4).alpha(name, 2.0));
    let peft = "diffusion_model.blocks.1.self_attn.k";
    let files = kohya.into_iter().chain([File::default().peft(peft, 32, 32, 4).alpha(peft, 2.0)]);
    let expected = product(32, 32, 4, 0.5);
    for file in files {
        for blocks in [&[0, 1][..], &[0, 1, 10, 11, 12, 111]] {
            for tensors in orders(&file.tensors) {
                let plan = File { tensors, ..file.clone() }.plan(&wan(blocks));
                check_applied(&plan);
                assert_eq!((plan.targets.len(), plan.targets[0].layer.as_str()), (1, "blocks.1.self_attn.k"));
                assert_eq!((plan.targets[0].scale, plan.targets[0].rank), (0.5, 4));
                // Bit for bit: the same parts are used in the same way.
                assert_eq!(
                    change(&plan.targets[0]),
                    change(
                        &File::default()
                            .kohya(spellings[1], 32, 32, 4)
                            .alpha(spellings[1], 2.0)
                            .plan(&wan(&[1]))
                            .targets[0]
                    )
                );
                assert!(change(&plan.targets[0]).iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-12));
            }
        }
    }
}

#[test]
fn a_number_is_a_whole_number() {
    // Block 1 is not there, and 10 and 11 are.
    let file = File::default().kohya("lora_unet_blocks_1_self_attn_k", 32, 32, 4);
    let plan = file.plan(&wan(&[0, 10, 11]));
    assert!(plan.targets.is_empty() && plan.refused.is_empty());
    assert_eq!(plan.absent[0].keys.len(), 2);
    // What flattening cannot tell apart is refused, unless the file has the dots.
    let twins = model([linear("blocks.1.0.k", 32, 32), linear("blocks.1_0.k", 32, 32)]);
    let plan = File::default().kohya("lora_unet_blocks_1_0_k", 32, 32, 4).plan(&twins);
    assert!(reasons(&plan).contains(r#"could be "blocks.1.0.k" or "blocks.1_0.k""#), "{}", plan.report());
    let plan = File::default().peft("blocks.1.0.k", 32, 32, 4).plan(&twins);
    check_applied(&plan);
    assert_eq!(plan.targets[0].layer, "blocks.1.0.k");
}

const QWEN: [(&str, u64, u64); 6] = [
    ("transformer_blocks.0.img_mod.1", 96, 16),
    ("transformer_blocks.0.attn.to_q", 16, 16),
    ("transformer_blocks.0.attn.add_k_proj", 16, 16),
    ("transformer_blocks.0.attn.to_out.0", 16, 16),
    ("transformer_blocks.0.img_mlp.net.0.proj", 64, 16),
    ("transformer_blocks.0.img_mlp.net.2", 16, 64),
];

fn qwen() -> Layers {
    model(QWEN.map(|(name, rows, columns)| linear(name, rows, columns)))
}

fn worded(prefix: &str, word: &str) -> File {
    QWEN.iter().fold(File::default(), |file, (name, rows, columns)| {
        file.with(&format!("{prefix}{name}.lora_A.{word}.weight"), "BF16", &[2, *columns]).with(
            &format!("{prefix}{name}.lora_B.{word}.weight"),
            "BF16",
            &[*rows, 2],
        )
    })
}

/// An adapter's name within the keys: <https://github.com/modelscope/DiffSynth-Studio/issues/886>
#[test]
fn an_adapter_name_is_any_word_and_one_word() {
    for word in ["default", "default_0", "my-style", "3", "lora"] {
        for prefix in
            ["", "transformer.", "diffusion_model.", "base_model.model.", "base_model.model.transformer."]
        {
            for tensors in orders(&worded(prefix, word).tensors) {
                let plan = File { tensors, ..File::default() }.plan(&qwen());
                check_applied(&plan);
                assert_eq!(plan.targets.len(), QWEN.len());
                let target = plan.targets.iter().find(|target| target.layer == QWEN[0].0).unwrap();
                assert_eq!((target.scale, target.rank), (1.0, 2));
                crate::close(&change(target), &product(96, 16, 2, 1.0));
            }
        }
    }
    // Two words, one behind the other, and two adapters in one file.
    let plan = worded("transformer.", "default_0.default").plan(&qwen());
    assert_eq!((plan.targets.len(), plan.refused.len()), (0, 12));
    assert!(reasons(&plan).contains("more than one adapter name"));
    let mut both = worded("", "a");
    both.tensors.extend(worded("", "b").tensors);
    let plan = both.plan(&qwen());
    assert_eq!((plan.targets.len(), plan.refused.len()), (0, 24));
    assert!(reasons(&plan).contains(r#"holds several adapters, "a" and "b""#));
}

#[test]
fn one_part_in_two_spellings_is_refused_and_a_prefix_is_not_a_name() {
    let twice = File::default().kohya("lora_unet_blocks_1_self_attn_k", 32, 32, 4).peft(
        "blocks.1.self_attn.k",
        32,
        32,
        4,
    );
    let plan = twice.plan(&wan(&[1]));
    assert_eq!((plan.targets.len(), plan.refused.len()), (0, 4));
    assert!(reasons(&plan).contains("are the same part of one layer"));
    // `transformer_blocks` is no `blocks` behind `transformer`.
    let plan = File::default().peft("transformer_blocks.1.self_attn.k", 32, 32, 4).plan(&wan(&[1]));
    assert!(plan.targets.is_empty() && plan.refused.is_empty());
    // A model whose own names begin like a wrapper: the plain keys of the file decide how the others are read.
    let both = model([linear("transformer.h.q", 8, 8), linear("h.q", 8, 8), linear("h.k", 8, 8)]);
    let plan = File::default().peft("transformer.h.q", 8, 8, 2).plan(&both);
    assert!(reasons(&plan).contains("could be"), "{}", plan.report());
    let plan = File::default().peft("transformer.h.q", 8, 8, 2).peft("transformer.h.k", 8, 8, 2).plan(&both);
    check_applied(&plan);
    assert_eq!(plan.targets.iter().map(|target| target.layer.as_str()).collect::<Vec<_>>(), ["h.k", "h.q"]);
}

#[test]
fn of_a_pipeline_one_model_is_meant() {
    let encoder = |layers: u64| {
        model((0..layers).map(|n| linear(&format!("text_model.encoder.layers.{n}.q_proj"), 32, 32)))
    };
    let file = |first: u64, second: u64| {
        let name = |te: u64, n| format!("lora_te{te}_text_model_encoder_layers_{n}_q_proj");
        let file = (0..first).fold(File::default(), |file, n| file.kohya(&name(1, n), 32, 32, 4));
        let file = (0..second).fold(file, |file, n| file.kohya(&name(2, n), 32, 32, 4));
        file.kohya("lora_unet_blocks_1_self_attn_k", 32, 32, 4)
    };
    // A small encoder has all of the first's layers and some of the second's; a large one has all of both.
    for (layers, targets, absent) in [(2, 2, 12), (5, 5, 6)] {
        let plan = file(2, 5).plan(&encoder(layers));
        assert_eq!((plan.targets.len(), plan.refused.len()), (targets, 0), "{}", plan.report());
        assert_eq!(plan.absent.iter().map(|one| one.keys.len()).sum::<usize>(), absent);
    }
    let plan = file(2, 5).plan(&encoder(2));
    let said: Vec<_> = plan.absent.iter().map(|absent| absent.summary.as_str()).collect();
    assert_eq!(
        said,
        ["transformer: 2 keys not in this model", "second text encoder: 10 keys not in this model"]
    );
    let plan = file(2, 5).plan(&wan(&[1]));
    assert_eq!((plan.targets.len(), plan.absent.len()), (1, 2));
    assert_eq!(plan.absent[0].summary, "text encoder: 4 keys not in this model");
    // Two that fit alike are told apart by whoever knows which model this is.
    let mut file = file(3, 3);
    let plan = file.plan(&encoder(3));
    assert!(reasons(&plan).contains("fit this model alike"), "{}", plan.report());
    file.options.component = Some("text_encoder_2".into());
    let plan = file.plan(&encoder(3));
    assert_eq!((plan.targets.len(), plan.refused.len()), (3, 0));
    assert!(plan.applied().iter().all(|key| key.starts_with("lora_te2")));
    // A text encoder's keys are not a transformer's, even where they would fit; the reverse may be.
    for (prefix, component, targets) in [
        ("text_encoder.", "transformer", 0),
        ("transformer.", "text_encoder", 1),
        ("transformer.", "transformer_2", 1),
        ("text_encoder.", "model", 1),
    ] {
        let mut file = File::default().peft(&format!("{prefix}blocks.1.self_attn.k"), 32, 32, 4);
        file.options.component = Some(component.into());
        let plan = file.plan(&wan(&[1]));
        assert_eq!((plan.targets.len(), plan.absent.len()), (targets, 1 - targets), "{prefix} {component}");
    }
}
