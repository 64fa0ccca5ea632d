//! Layers that are fused in a file and apart in a model, and the reverse.

use lora_runtime::{AdapterPlan, Layers, Role};

use crate::common::{File, check_applied, linear, model, reasons};
use crate::{change, close, product};

const H: u64 = 8;
const LINEAR1: [(&str, u64); 4] = [("q", H), ("k", H), ("v", H), ("mlp", 4 * H)];

/// Flux as its authors have it.
fn fused() -> Layers {
    model([
        linear("single_blocks.0.linear1", 7 * H, H),
        linear("single_blocks.0.linear2", H, 5 * H),
        linear("double_blocks.0.img_attn.qkv", 3 * H, H),
    ])
}

/// The same, apart, in the names that several libraries use.
fn split(single: [&str; 5], double: [&str; 3]) -> Layers {
    let rows = [H, H, H, 4 * H];
    let inputs = single[..4].iter().zip(rows).map(|(name, rows)| linear(name, rows, H));
    let output = [linear(single[4], H, 5 * H)];
    model(inputs.chain(output).chain(double.map(|name| linear(name, H, H))))
}

fn splits() -> Vec<Layers> {
    let plain = ["q", "k", "v", "mlp"].map(|part| format!("single_blocks.0.{part}"));
    let mine = split(
        [&plain[0], &plain[1], &plain[2], &plain[3], "single_blocks.0.linear2"],
        ["double_blocks.0.img_attn.to_q", "double_blocks.0.img_attn.to_k", "double_blocks.0.img_attn.to_v"],
    );
    let diffusers = split(
        [
            "single_transformer_blocks.0.attn.to_q",
            "single_transformer_blocks.0.attn.to_k",
            "single_transformer_blocks.0.attn.to_v",
            "single_transformer_blocks.0.proj_mlp",
            "single_transformer_blocks.0.proj_out",
        ],
        [
            "transformer_blocks.0.attn.to_q",
            "transformer_blocks.0.attn.to_k",
            "transformer_blocks.0.attn.to_v",
        ],
    );
    vec![mine, diffusers]
}

fn kohya(rank: u64) -> File {
    let layers = [
        ("lora_unet_single_blocks_0_linear1", 7 * H, H),
        ("lora_unet_single_blocks_0_linear2", H, 5 * H),
        ("lora_unet_double_blocks_0_img_attn_qkv", 3 * H, H),
    ];
    layers.iter().fold(File::default(), |file, (name, rows, columns)| {
        file.kohya(name, *rows, *columns, rank).alpha(name, 32.0)
    })
}

/// The changes of some layers, under each other.
fn stacked(plan: &AdapterPlan, layers: &[String]) -> Vec<f64> {
    let of = |layer: &String| {
        let mut targets: Vec<_> = plan.targets.iter().filter(|target| target.layer == *layer).collect();
        targets.sort_by_key(|target| target.rows.as_ref().map(|rows| rows.start));
        assert!(!targets.is_empty(), "nothing for {layer}");
        targets.into_iter().flat_map(change).collect::<Vec<_>>()
    };
    layers.iter().flat_map(of).collect()
}

/// The lower factor was cut with the upper one: <https://github.com/mflux-community/mflux/issues/458>,
/// <https://github.com/mflux-community/mflux/issues/423>
#[test]
fn only_the_upper_factor_is_cut() {
    for rank in [3, 4, 5, 12, 16, 64] {
        let scale = 32.0 / rank as f64;
        let whole = kohya(rank).plan(&fused());
        check_applied(&whole);
        let expected = product(56, 8, rank as usize, scale);
        close(&stacked(&whole, &["single_blocks.0.linear1".into()]), &expected);
        for layers in splits() {
            let plan = kohya(rank).plan(&layers);
            check_applied(&plan);
            let names: Vec<_> = layers.iter().map(|layer| layer.name.clone()).collect();
            close(&stacked(&plan, &names[..4]), &expected);
            close(&stacked(&plan, &names[5..]), &product(24, 8, rank as usize, scale));
            close(&stacked(&plan, &names[4..5]), &product(8, 40, rank as usize, scale));
            for target in &plan.targets {
                assert_eq!(target.parts[&Role::Down].rows, None);
                assert_eq!((target.rank, target.scale), (rank, scale));
            }
        }
    }
}

#[test]
fn parts_find_their_rows_in_a_fused_layer() {
    for prefix in ["single_blocks.0.", "single_transformer_blocks.0."] {
        let names = if prefix.contains("transformer") {
            ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"]
        } else {
            ["q", "k", "v", "mlp"]
        };
        // All of them, then each alone.
        for chosen in [&[0, 1, 2, 3][..], &[0], &[2], &[3], &[1, 3]] {
            let file = chosen.iter().fold(File::default(), |file, n| {
                file.peft(&format!("transformer.{prefix}{}", names[*n]), LINEAR1[*n].1, H, 4)
            });
            let plan = file.plan(&fused());
            check_applied(&plan);
            for (n, target) in chosen.iter().zip(&plan.targets) {
                let first = LINEAR1[..*n].iter().map(|(_, rows)| rows).sum::<u64>();
                assert_eq!(target.layer, "single_blocks.0.linear1");
                assert_eq!(target.rows, Some(first..first + LINEAR1[*n].1));
                close(&change(target), &product(LINEAR1[*n].1 as usize, 8, 4, 1.0));
            }
        }
    }
}

#[test]
fn grouped_attention_has_queries_of_their_own_size() {
    let layers = model([linear("a.qkv_proj", 32, 8)]);
    let file = File::default().peft("a.q_proj", 16, 8, 2).peft("a.k_proj", 8, 8, 2).peft("a.v_proj", 8, 8, 2);
    let rows =
        |file: &File| file.plan(&layers).targets.into_iter().map(|t| t.rows.unwrap()).collect::<Vec<_>>();
    assert_eq!(rows(&file), [0..16, 16..24, 24..32]);
    assert_eq!(rows(&File::default().peft("a.v_proj", 8, 8, 2)), [24..32]);
    // Rows that do not add up are no part of it.
    let plan = File::default().peft("a.q_proj", 17, 8, 2).plan(&layers);
    assert!(reasons(&plan).contains("nothing tells which rows"), "{}", plan.report());
    // Made for a variant of the model it may be left out, with the other layers applied.
    let both = model([linear("a.qkv_proj", 32, 8), linear("a.out", 8, 8)]);
    let mut file = File::default().peft("a.q_proj", 17, 8, 2).peft("a.out", 8, 8, 2);
    file.options.ignore_variations = true;
    let plan = file.plan(&both);
    assert_eq!((plan.targets.len(), plan.skipped.len(), plan.refused.len()), (1, 2, 0), "{}", plan.report());
    let apart = model([linear("a.q_proj", 16, 8), linear("a.k_proj", 8, 8), linear("a.v_proj", 8, 8)]);
    let plan = File::default().kohya("lora_unet_a_qkv_proj", 32, 8, 2).plan(&apart);
    check_applied(&plan);
    assert_eq!(
        plan.targets.iter().map(|t| t.parts[&Role::Up].rows.clone()).collect::<Vec<_>>(),
        [Some(16..24), Some(0..16), Some(24..32)]
    );
    // A fused file of another size fits none of them.
    let plan = File::default().kohya("lora_unet_a_qkv_proj", 48, 8, 2).plan(&apart);
    assert!(reasons(&plan).contains("has the shape [48, 2]"), "{}", plan.report());
}

#[test]
fn the_callers_map_goes_before_what_is_usual() {
    let map = r#"{"attn.mix": {"mapped_modules": ["one", "two"], "split_sizes": [8, 16]}}"#;
    let with = |file: File| {
        let mut file = file;
        file.options.split = Some(map.into());
        file
    };
    let fused = model([linear("b.0.attn.mix", 24, 8)]);
    let plan = with(File::default().peft("b.0.two", 16, 8, 2)).plan(&fused);
    check_applied(&plan);
    assert_eq!(plan.targets[0].rows, Some(8..24));
    let apart = model([linear("b.0.one", 8, 8), linear("b.0.two", 16, 8)]);
    let plan = with(File::default().kohya("lora_unet_b_0_attn_mix", 24, 8, 2)).plan(&apart);
    check_applied(&plan);
    assert_eq!(plan.targets[1].parts[&Role::Up].rows, Some(8..24));
    // Sizes that the model does not have.
    let other = model([linear("b.0.one", 12, 8), linear("b.0.two", 12, 8)]);
    let plan = with(File::default().kohya("lora_unet_b_0_attn_mix", 24, 8, 2)).plan(&other);
    assert!(reasons(&plan).contains("split_linear_modules_map gives"), "{}", plan.report());
    // Where the file has the fused layer and a part of it too, nobody says what both are.
    let both = File::default().peft("b.0.attn.mix", 24, 8, 2).peft("b.0.two", 16, 8, 2);
    let plan = with(both).plan(&fused);
    assert_eq!((plan.targets.len(), plan.refused.len()), (0, 4));
    assert!(reasons(&plan).contains("change the same rows"));
}

#[test]
fn halves_that_diffusers_swaps_are_swapped() {
    let layers = model([linear("norm_out.linear", 2 * H, H)]);
    let name = "lora_unet_final_layer_adaLN_modulation_1";
    let plan = File::default().kohya(name, 2 * H, H, 2).plan(&layers);
    check_applied(&plan);
    let [first, second] = &plan.targets[..] else { panic!("{}", plan.report()) };
    assert_eq!((first.rows.clone(), first.parts[&Role::Up].rows.clone()), (Some(0..8), Some(8..16)));
    assert_eq!((second.rows.clone(), second.parts[&Role::Up].rows.clone()), (Some(8..16), Some(0..8)));
}
