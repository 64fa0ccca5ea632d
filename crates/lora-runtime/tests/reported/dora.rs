//! Magnitudes: rows or columns, in every spelling, and never left out.

use lora_runtime::reference::merged_weight;
use lora_runtime::{AdapterTarget, Layers, Role};

use crate::common::{File, check_applied, linear, model, reasons};
use crate::{close, numbers, parts, product, values};

fn layers() -> Layers {
    model([
        linear("blocks.0.cross_attn.k", 32, 32),
        linear("transformer_blocks.0.attn.to_q", 32, 32),
        linear("tall.q", 16, 8),
    ])
}

/// `g (W + D) / |W + D|` along an axis, by the formula.
fn expected(target: &AdapterTarget, scale: f64, rank: usize) -> Vec<f64> {
    let (rows, columns) = (target.shape[0] as usize, target.shape[1] as usize);
    let (weight, product) = (numbers(Role::Diff, rows * columns), product(rows, columns, rank, scale));
    let sum: Vec<_> = weight.iter().zip(product).map(|(w, d)| w + d).collect();
    let lane = |at: usize| if target.axis == Some(1) { at % columns } else { at / columns };
    let count = if target.axis == Some(1) { columns } else { rows };
    let magnitude = numbers(Role::Magnitude, count);
    let length =
        |n: usize| (0..sum.len()).filter(|at| lane(*at) == n).map(|at| sum[at] * sum[at]).sum::<f64>().sqrt();
    let lengths: Vec<_> = (0..count).map(length).collect();
    (0..sum.len()).map(|at| magnitude[lane(at)] * sum[at] / lengths[lane(at)]).collect()
}

fn merged(target: &AdapterTarget, multiplier: f64) -> Vec<f64> {
    let (all, numbers) = (parts(target), |count| numbers(Role::Diff, count));
    let count = target.shape.iter().product::<u64>() as usize;
    merged_weight(target, &numbers(count), &values(&all), multiplier).unwrap()
}

/// Magnitudes that were skipped: <https://github.com/deepbeepmeep/Wan2GP/issues/288>,
/// <https://github.com/Comfy-Org/ComfyUI/issues/3494>, <https://github.com/Comfy-Org/ComfyUI/issues/4259>,
/// <https://github.com/lllyasviel/stable-diffusion-webui-forge/issues/635>
#[test]
fn the_axis_is_in_the_shape() {
    let wan = "diffusion_model.blocks.0.cross_attn.k";
    let peft = "transformer.transformer_blocks.0.attn.to_q";
    let cases: [(&str, &str, &[u64], u8); 9] = [
        (wan, "dora_scale", &[1, 32], 1),
        (wan, "dora_scale", &[32, 1], 0),
        (wan, "dora_scale", &[32], 0),
        (peft, "lora_magnitude_vector", &[32], 0),
        (peft, "lora_magnitude_vector.weight", &[32], 0),
        (peft, "lora_magnitude_vector.default.weight", &[32], 0),
        ("lycoris_tall_q", "dora_scale", &[8], 1),
        ("lycoris_tall_q", "dora_scale", &[1, 8], 1),
        ("lycoris_tall_q", "dora_scale", &[16, 1], 0),
    ];
    for (name, ending, shape, axis) in cases {
        let (rows, columns) = if name.contains("tall") { (16, 8) } else { (32, 32) };
        let file = File::default().kohya(name, rows, columns, 4).alpha(name, 2.0);
        let plan = file.with(&format!("{name}.{ending}"), "F32", shape).plan(&layers());
        check_applied(&plan);
        let target = &plan.targets[0];
        assert_eq!((target.axis, target.scale), (Some(axis), 0.5), "{ending} {shape:?}");
        close(&merged(target, 1.0), &expected(target, 0.5, 4));
        // Without strength it is the weight itself.
        close(&merged(target, 0.0), &numbers(Role::Diff, (rows * columns) as usize));
    }
}

#[test]
fn a_magnitude_is_never_dropped() {
    let name = "blocks.0.cross_attn.k";
    let lone = File::default().with(&format!("{name}.dora_scale"), "F32", &[32, 1]).plan(&layers());
    assert!(reasons(&lone).contains("DoRA"), "{}", lone.report());
    let wrong = File::default()
        .peft(name, 32, 32, 4)
        .with(&format!("{name}.dora_scale"), "F32", &[31, 1])
        .plan(&layers());
    assert_eq!((wrong.targets.len(), wrong.refused.len()), (0, 3));
    let file = File::default().peft(name, 32, 32, 4);
    let said = File { config: Some(r#"{"use_dora": true}"#.into()), ..file.clone() }.plan(&layers());
    assert!(reasons(&said).contains("no magnitude"), "{}", said.report());
    let header = r#"{"transformer.use_dora": true}"#;
    assert!(reasons(&file.field("lora_adapter_metadata", header).plan(&layers())).contains("no magnitude"));
}

/// A vector a part, of a fused layer's rows: <https://github.com/xmarre/ComfyUI-DoRA-Dynamic-LoRA-Loader/issues/24>
#[test]
fn fused_layers_take_a_vector_a_part_and_give_their_own_by_rows() {
    let fused = model([linear("a.qkv", 96, 32)]);
    let file = ["to_q", "to_k", "to_v"].iter().fold(File::default(), |file, part| {
        file.peft(&format!("a.{part}"), 32, 32, 4).with(
            &format!("a.{part}.lora_magnitude_vector"),
            "F32",
            &[32],
        )
    });
    let plan = file.plan(&fused);
    check_applied(&plan);
    let apart = model(["a.to_q", "a.to_k", "a.to_v"].map(|name| linear(name, 32, 32)));
    let alone = file.plan(&apart);
    check_applied(&alone);
    let whole = numbers(Role::Diff, 96 * 32);
    for (part, other) in plan.targets.iter().zip(["a.to_q", "a.to_k", "a.to_v"]) {
        let other = alone.targets.iter().find(|target| target.layer == other).unwrap();
        let rows = part.rows.clone().unwrap();
        let range = rows.start as usize * 32..rows.end as usize * 32;
        let merged = merged_weight(part, &whole, &values(&parts(part)), 0.7).unwrap();
        let expected = merged_weight(other, &whole[range.clone()], &values(&parts(other)), 0.7).unwrap();
        close(&merged[range.clone()], &expected);
        assert_eq!(
            (&merged[..range.start], &merged[range.end..]),
            (&whole[..range.start], &whole[range.end..])
        );
    }
    // The other way round: lengths of rows are the parts' own, lengths of columns are not.
    let name = "lora_unet_a_qkv";
    let file = File::default().kohya(name, 96, 32, 4);
    let rows = file.clone().with(&format!("{name}.dora_scale"), "F32", &[96, 1]).plan(&apart);
    check_applied(&rows);
    assert_eq!(rows.targets[0].parts[&Role::Magnitude].rows, Some(32..64));
    let columns = file.with(&format!("{name}.dora_scale"), "F32", &[1, 32]).plan(&apart);
    assert!(reasons(&columns).contains("one number a column"), "{}", columns.report());
}
