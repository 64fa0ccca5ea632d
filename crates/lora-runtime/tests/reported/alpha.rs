//! Scales: a rank a layer, alpha as a tensor, in the header, in a file beside it, or nowhere.

use lora_runtime::{AdapterPlan, Layers};

use crate::common::{File, check_applied, linear, model, reasons};

const FLUX: [(&str, u64, u64, u64, f64); 4] = [
    ("attn_proj", 24, 24, 10, 10.0),
    ("attn_qkv", 72, 24, 10, 10.0),
    ("mlp_0", 96, 24, 18, 18.0),
    ("mlp_2", 24, 96, 11, 11.0),
];

fn name(part: &str) -> String {
    format!("lora_unet_double_blocks_0_img_{part}")
}

fn flux() -> Layers {
    model(FLUX.map(|(part, rows, columns, ..)| {
        linear(&format!("double_blocks.0.img_{}", part.replacen('_', ".", 1)), rows, columns)
    }))
}

fn file(without: Option<&str>) -> File {
    FLUX.iter().fold(File::default(), |file, (part, rows, columns, rank, alpha)| {
        let file = file.kohya(&name(part), *rows, *columns, *rank);
        if without == Some(part) { file } else { file.alpha(&name(part), *alpha) }
    })
}

fn scale(plan: &AdapterPlan, part: &str) -> f64 {
    plan.targets.iter().find(|target| target.layer.ends_with(&part.replacen('_', ".", 1))).unwrap().scale
}

/// Ranks and alphas that differ by layer: <https://github.com/huggingface/diffusers/pull/10985>,
/// <https://github.com/nunchux-ai/ComfyUI-nunchaku/issues/94>
#[test]
fn each_layer_has_its_own_rank_and_alpha() {
    let plan = file(None).plan(&flux());
    check_applied(&plan);
    for (part, _, _, rank, alpha) in FLUX {
        assert!((scale(&plan, part) - alpha / rank as f64).abs() < f64::EPSILON);
    }
    let plan = file(Some("mlp_0")).plan(&flux());
    check_applied(&plan);
    assert_eq!(FLUX.map(|(part, ..)| scale(&plan, part)), [1.0; 4]);
    let named = plan.targets.iter().find(|target| target.layer.ends_with("mlp.2")).unwrap();
    assert_eq!(named.rank, 11);
}

#[test]
fn an_alpha_of_any_float_and_shape_is_one_number() {
    let key = format!("{}.alpha", name("mlp_2"));
    for (dtype, shape, value) in [
        ("BF16", &[1][..], 5.5),
        ("F16", &[], 65504.0),
        ("F32", &[1, 1], -3.0),
        ("I64", &[], 22.0),
        ("F32", &[], 0.0),
    ] {
        let mut file = file(Some("mlp_2")).with(&key, dtype, shape);
        file.scalars.insert(key.clone(), value);
        let plan = file.plan(&flux());
        check_applied(&plan);
        assert!((scale(&plan, "mlp_2") - value / 11.0).abs() <= 1e-12 * value.abs(), "{dtype}");
        assert_eq!(scale(&plan, "mlp_0"), 1.0);
        assert_eq!(plan.notes.len(), usize::from(value == 0.0));
    }
    for (shape, value, why) in [
        (&[][..], Some(f64::NAN), "NaN, which is no alpha"),
        (&[], Some(f64::INFINITY), "inf, which is no alpha"),
        (&[2], Some(1.0), "should be one number"),
        (&[0], None, "holds no numbers"),
        (&[], None, "could not be read"),
    ] {
        let mut file = file(Some("mlp_2")).with(&key, "F32", shape);
        file.scalars.extend(value.map(|value| (key.clone(), value)));
        let plan = file.plan(&flux());
        assert_eq!((plan.refused.len(), plan.targets.len()), (3, 3), "{}", plan.report());
        assert!(reasons(&plan).contains(why) && reasons(&plan).contains(&key), "{}", plan.report());
    }
}

/// A file of rank 16 without alpha tensors.
fn bare() -> File {
    File::default().peft("transformer.blocks.0.q", 32, 32, 16)
}

fn blocks() -> Layers {
    model([linear("blocks.0.q", 32, 32), linear("blocks.0.k", 32, 32)])
}

/// Alpha in the header only: <https://github.com/Comfy-Org/ComfyUI/issues/12191>
#[test]
fn alpha_of_the_header_is_used_where_there_is_no_tensor() {
    let scales: &[(&[(&str, &str)], f64)] = &[
        (&[("lora_alpha", "64"), ("r", "16")], 4.0),
        (&[("transformer.lora_alpha", "64"), ("transformer.r", "16")], 4.0),
        (&[("network_alpha", "64")], 4.0),
        (&[("transformer.lora_alpha", "64"), ("text_encoder.lora_alpha", "8")], 4.0),
        (&[("text_encoder.lora_alpha", "8")], 1.0),
        (&[("lora_adapter_metadata", r#"{"transformer.lora_alpha": 64, "transformer.r": 16}"#)], 4.0),
        (&[("lora_alpha", "64"), ("use_rslora", "true")], 16.0),
        (&[("ss_network_alpha", "64"), ("ss_network_dim", "16")], 1.0),
        (&[("lora_alpha", "None"), ("format", "pt"), ("alpha", "3")], 1.0),
        (&[], 1.0),
    ];
    for (fields, expected) in scales {
        let file = fields.iter().fold(bare(), |file, (key, text)| file.field(key, text));
        let plan = file.plan(&blocks());
        check_applied(&plan);
        assert_eq!((plan.targets[0].scale, plan.notes.len()), (*expected, 0), "{fields:?} {:?}", plan.notes);
        // Keys without a prefix are the transformer's.
        let tensors = file.tensors.iter().cloned().map(|mut tensor| {
            tensor.key = tensor.key.replace("transformer.", "");
            tensor
        });
        let plain = File { tensors: tensors.collect(), ..file }.plan(&blocks());
        let only = fields.len() == 1 && fields[0].0.starts_with("text_encoder");
        assert_eq!(plain.targets[0].scale, if only { 0.5 } else { *expected });
    }
    // A tensor wins.
    let plan = bare().alpha("transformer.blocks.0.q", 8.0).field("lora_alpha", "64").plan(&blocks());
    assert_eq!(plan.targets[0].scale, 0.5);
}

#[test]
fn a_header_that_cannot_be_right_is_ignored_with_a_note_that_names_the_field() {
    let bad: &[(&[(&str, &str)], &str)] = &[
        (&[("lora_alpha", "abc")], "\"lora_alpha\" is \"abc\", which is no number"),
        (&[("lora_alpha", "NaN")], "\"lora_alpha\" is \"NaN\", which is no number"),
        (&[("lora_alpha", "64"), ("r", "8")], "\"r\" is 8, and the tensors are of rank 16"),
        (&[("lora_alpha", "64"), ("network_alpha", "32")], "contradict"),
        (&[("lora_adapter_metadata", "{")], "lora_adapter_metadata"),
    ];
    for (fields, why) in bad {
        let plan = fields.iter().fold(bare(), |file, (key, text)| file.field(key, text)).plan(&blocks());
        check_applied(&plan);
        assert_eq!((plan.targets[0].scale, plan.notes.len()), (1.0, 1), "{fields:?}");
        assert!(plan.notes[0].contains(why), "{:?}", plan.notes);
    }
}

#[test]
fn a_blank_alpha_is_refused_by_its_field_where_nothing_else_says_it() {
    for (field, text) in [("lora_alpha", ""), ("network_alpha", " "), ("transformer.lora_alpha", "")] {
        let plan = bare().field(field, text).plan(&blocks());
        assert_eq!((plan.refused.len(), plan.targets.len()), (2, 0), "{}", plan.report());
        assert!(reasons(&plan).contains(&format!("{field:?} is empty")), "{}", plan.report());
        let plan = bare().field(field, text).alpha("transformer.blocks.0.q", 8.0).plan(&blocks());
        check_applied(&plan);
        assert_eq!(plan.targets[0].scale, 0.5);
    }
    let nested = bare().field("lora_adapter_metadata", r#"{"lora_alpha": ""}"#).plan(&blocks());
    assert!(reasons(&nested).contains("\"lora_alpha\" is empty"), "{}", nested.report());
    check_applied(&bare().field("r", "").plan(&blocks()));
}

#[test]
fn the_configuration_beside_a_file_counts_and_contradicts() {
    let with = |config: &str, fields: &[(&str, &str)]| {
        let file = fields.iter().fold(bare(), |file, (key, text)| file.field(key, text));
        File { config: Some(config.into()), ..file }.plan(&blocks())
    };
    let plain = with(r#"{"peft_type": "LORA", "r": 16, "lora_alpha": 64, "alpha_pattern": {}}"#, &[]);
    assert_eq!((plain.targets[0].scale, plain.notes.len()), (4.0, 0));
    let same = with(r#"{"r": 16, "lora_alpha": 64}"#, &[("lora_alpha", "64")]);
    assert_eq!((same.targets[0].scale, same.notes.len()), (4.0, 0));
    let other = with(r#"{"r": 16, "lora_alpha": 32}"#, &[("lora_alpha", "64")]);
    assert_eq!(other.targets[0].scale, 1.0);
    assert!(other.notes[0].contains("adapter_config.json gives 32"), "{:?}", other.notes);
    let pattern =
        with(r#"{"r": 8, "lora_alpha": 1, "alpha_pattern": {"q": 32}, "rank_pattern": {"0.q": 16}}"#, &[]);
    assert_eq!(pattern.targets[0].scale, 2.0);
    let expression = with(r#"{"r": 16, "lora_alpha": 1, "alpha_pattern": {".*q": 32}}"#, &[]);
    assert!(reasons(&expression).contains(r#"the pattern ".*q""#), "{}", expression.report());
    let rooted = with(r#"{"r": 16, "lora_alpha": 64, "use_rslora": true}"#, &[]);
    assert_eq!(rooted.targets[0].scale, 16.0);
    let file = File { config: Some("[".into()), ..bare() };
    let error = lora_runtime::resolve(&blocks(), &file.made(), &file.options).unwrap_err();
    assert!(error.to_string().starts_with("adapter_config.json cannot be read"), "{error}");
}
