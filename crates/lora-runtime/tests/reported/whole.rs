//! Whole differences, and layers that the model does not have.

use lora_runtime::reference::{merged_bias, merged_weight};
use lora_runtime::{AdapterKind, Layers, Role};

use crate::common::{File, check_applied, layer, linear, model, reasons};
use crate::{numbers, parts, values};

fn wan(blocks: u64) -> Layers {
    model((0..blocks).flat_map(|block| {
        [
            linear(&format!("blocks.{block}.self_attn.q"), 32, 32),
            layer(&format!("blocks.{block}.self_attn.norm_q"), "norm", &[32], false),
            linear(&format!("blocks.{block}.cross_attn.k"), 32, 32),
            layer(&format!("blocks.{block}.modulation"), "parameter", &[1, 6, 32], false),
        ]
    }))
}

fn speed(blocks: u64) -> File {
    (0..blocks).fold(File::default(), |file, block| {
        let block = format!("diffusion_model.blocks.{block}");
        let image = format!("{block}.cross_attn.k_img");
        file.kohya(&format!("{block}.self_attn.q"), 32, 32, 4)
            .with(&format!("{block}.self_attn.q.diff_b"), "BF16", &[32])
            .with(&format!("{block}.self_attn.norm_q.diff"), "BF16", &[32])
            .kohya(&image, 32, 32, 4)
            .with(&format!("{image}.diff_b"), "BF16", &[32])
            .with(&format!("{block}.cross_attn.norm_k_img.diff"), "BF16", &[32])
            .with(&format!("{block}.diff_m"), "BF16", &[1, 6, 32])
    })
}

/// A speed `LoRA` for images on a model for text: <https://github.com/kijai/ComfyUI-WanVideoWrapper/issues/940>,
/// <https://github.com/kijai/ComfyUI-WanVideoWrapper/issues/807>, <https://github.com/kijai/ComfyUI-WanVideoWrapper/issues/909>,
/// <https://github.com/ModelTC/LightX2V/issues/1246>, <https://github.com/Comfy-Org/ComfyUI/issues/1467>
#[test]
fn what_the_model_has_is_applied_and_the_rest_is_one_sentence() {
    let plan = speed(40).plan(&wan(40));
    assert!(plan.refused.is_empty() && plan.skipped.is_empty(), "{}", plan.report());
    assert_eq!(plan.applied().len(), 40 * 5);
    let [absent] = &plan.absent[..] else { panic!("{}", plan.report()) };
    assert_eq!(absent.keys.len(), 40 * 4);
    assert_eq!(
        absent.summary,
        "image cross-attention (blocks_*_cross_attn: k_img, norm_k_img): 40 blocks × 4 keys not in this model"
    );
    let lines: Vec<_> = plan.report().lines().map(str::to_owned).collect();
    assert_eq!(lines[0], "applied: 200 keys as 80 diff, 40 diff_bias, 40 lora");
    assert_eq!(lines[1], "absent: 160 keys");
}

#[test]
fn norms_biases_and_modulations_change_by_strength_times_the_difference() {
    let plan = speed(1).plan(&wan(1));
    for strength in [1.0, 0.25, 0.0] {
        for target in plan.targets.iter().filter(|target| target.kind != AdapterKind::Lora) {
            let (all, bias) = (parts(target), target.kind == AdapterKind::DiffBias);
            let count = if bias { 32 } else { target.shape.iter().product::<u64>() as usize };
            let base = numbers(Role::Up, count);
            let merge = if bias { merged_bias } else { merged_weight };
            let merged = merge(target, &base, &values(&all), strength).unwrap();
            let expected: Vec<_> =
                base.iter().zip(&all[&Role::Diff]).map(|(base, diff)| base + strength * diff).collect();
            assert_eq!(merged, expected, "{}", target.layer);
        }
    }
    assert_eq!(plan.targets.iter().filter(|target| target.layer == "blocks.0.modulation").count(), 1);
}

#[test]
fn a_difference_without_a_place_is_refused() {
    let bare = model([layer("blocks.0.self_attn.q", "linear", &[32, 32], false)]);
    let key = "blocks.0.self_attn.q.diff_b";
    let plan = File::default().with(key, "BF16", &[32]).plan(&bare);
    assert!(reasons(&plan).contains("a layer that has none"), "{}", plan.report());
    // Shapes of other models, which may be left out if that is allowed.
    for (key, shape) in [
        ("blocks.0.diff_m", &[1, 6, 33][..]),
        ("blocks.0.self_attn.norm_q.diff", &[33]),
        ("blocks.0.self_attn.q.diff", &[32, 31]),
        ("blocks.0.modulation.diff", &[6, 32]),
    ] {
        let mut file = File::default().with(key, "BF16", shape).peft("blocks.0.cross_attn.k", 32, 32, 4);
        let plan = file.plan(&wan(1));
        assert_eq!((plan.refused.len(), plan.targets.len()), (1, 1), "{}", plan.report());
        file.options.ignore_variations = true;
        let plan = file.plan(&wan(1));
        assert_eq!((plan.refused.len(), plan.skipped.len(), plan.targets.len()), (0, 1, 1));
        assert!(plan.skipped[0].reason.contains("has the shape"));
    }
    // A module of that name is no parameter, and a block without one has nothing to change.
    let module = model([linear("blocks.0.modulation", 32, 32)]);
    let file = File::default().with("blocks.0.diff_m", "BF16", &[32, 32]);
    assert!(reasons(&file.plan(&module)).contains("modulation of a block"));
    let plan = file.plan(&model([linear("blocks.0.q", 32, 32)]));
    assert_eq!(plan.absent.len(), 1);
}

#[test]
fn an_alpha_beside_a_difference_means_nothing_and_is_said() {
    let name = "blocks.0.self_attn.norm_q";
    let plan = File::default().with(&format!("{name}.diff"), "BF16", &[32]).alpha(name, 4.0).plan(&wan(1));
    assert_eq!((plan.targets.len(), plan.refused.len(), plan.targets[0].scale), (1, 0, 1.0));
    assert_eq!(plan.skipped[0].reason, "a whole difference has no alpha");
}

#[test]
fn what_replaces_a_weight_is_refused_by_name() {
    let file = File::default()
        .with("blocks.0.self_attn.norm_q.set_weight", "BF16", &[32])
        .with("blocks.0.self_attn.q.weight", "BF16", &[32, 32])
        .peft("blocks.0.cross_attn.k", 32, 32, 4);
    let plan = file.plan(&wan(1));
    assert_eq!(plan.refused.len(), 2);
    assert!(reasons(&plan).contains("set_weight: it replaces a weight"), "{}", plan.report());
    check_applied(&File { tensors: file.tensors[2..].to_vec(), ..File::default() }.plan(&wan(1)));
}

#[test]
fn a_full_checkpoint_is_told_to_be_one() {
    let names = ["self_attn.q", "self_attn.k", "cross_attn.k", "ffn.0"];
    let weights = |prefix: &str| {
        names.iter().fold(File::default(), |file, name| {
            let name = format!("{prefix}blocks.0.{name}");
            let file = file.with(&format!("{name}.weight"), "F8_E4M3", &[32, 32]);
            file.with(&format!("{name}.bias"), "BF16", &[32]).with(
                &format!("{name}.weight_scale"),
                "F32",
                &[],
            )
        })
    };
    for prefix in ["", "model.diffusion_model.", "diffusion_model."] {
        let plan = weights(prefix).plan(&wan(1));
        let sentence = plan.checkpoint.clone().unwrap();
        assert!(sentence.starts_with("it is a full checkpoint and no adapter: 12 tensors"), "{sentence}");
        assert!(sentence.contains("of them are of this model") && plan.targets.is_empty(), "{sentence}");
        assert_eq!(plan.report(), sentence);
    }
    let other = File::default().with("layers.0.mixer.weight", "BF16", &[8, 8]).alpha("vocoder.0", 1.0);
    assert!(other.plan(&wan(1)).checkpoint.unwrap().contains("none of them is of this model"));
    // An adapter with a weight in it is one, and so is one of a kind that nobody reads.
    let mixed = weights("").peft("blocks.0.self_attn.q", 32, 32, 4);
    let unread = File::default().with("blocks.0.self_attn.q.vera_lambda_b.weight", "BF16", &[32]);
    for file in [mixed, unread, File::default(), File::default().with("blocks.0.q.gate", "BF16", &[1])] {
        assert_eq!(file.plan(&wan(1)).checkpoint, None);
    }
}
