//! `LoKr`: what its scale is, and its rows on layers that are apart.

use lora_runtime::{Layers, Role};

use crate::common::{File, check_applied, linear, model, reasons};
use crate::{change, close, numbers};

/// Parts and their shapes.
type Named<'a> = &'a [(&'a str, &'a [u64])];

const NAME: &str = "diffusion_model.double_blocks.0.img_attn.qkv";

fn fused() -> Layers {
    model([linear("double_blocks.0.img_attn.qkv", 96, 32)])
}

fn apart() -> Layers {
    model(["q", "k", "v"].map(|part| linear(&format!("double_blocks.0.img_attn.to_{part}"), 32, 32)))
}

fn file(parts: Named<'_>, alpha: f64, dtype: &str) -> File {
    let file = parts.iter().fold(File::default(), |file, (part, shape)| {
        file.with(&format!("{NAME}.lokr_{part}"), "BF16", shape)
    });
    let mut file = file.with(&format!("{NAME}.alpha"), dtype, &[]);
    file.scalars.insert(format!("{NAME}.alpha"), alpha);
    file
}

fn matrix(a: &[f64], b: &[f64], rank: usize) -> Vec<f64> {
    let (rows, columns) = (a.len() / rank, b.len() / rank);
    let at = |n: usize| (0..rank).map(|k| a[n / columns * rank + k] * b[k * columns + n % columns]).sum();
    (0..rows * columns).map(at).collect()
}

fn kron(a: &[f64], a_columns: usize, b: &[f64], b_columns: usize) -> Vec<f64> {
    let (b_rows, columns) = (b.len() / b_columns, a_columns * b_columns);
    let at = |n: usize| {
        let (row, column) = (n / columns, n % columns);
        let first = a[row / b_rows * a_columns + column / b_columns];
        first * b[row % b_rows * b_columns + column % b_columns]
    };
    (0..a.len() * b.len()).map(at).collect()
}

/// Full factors, and a placeholder for alpha: <https://github.com/huggingface/diffusers/issues/13137>,
/// <https://github.com/huggingface/diffusers/issues/13261>; whether alpha counts then is disputed in
/// <https://github.com/Comfy-Org/ComfyUI/issues/15114>, and the trainer's own code says that it does not.
#[test]
fn alpha_counts_where_a_factor_has_a_rank() {
    let w1 = numbers(Role::W1, 16);
    let w2 = numbers(Role::W2, 24 * 8);
    let w2_low = matrix(&numbers(Role::W2A, 48), &numbers(Role::W2B, 16), 2);
    let w1_low = matrix(&numbers(Role::W1A, 8), &numbers(Role::W1B, 8), 2);
    let scaled = |numbers: Vec<f64>, scale: f64| numbers.into_iter().map(|n| n * scale).collect::<Vec<_>>();
    let full: Named<'_> = &[("w1", &[4, 4]), ("w2", &[24, 8])];
    let second: Named<'_> = &[("w1", &[4, 4]), ("w2_a", &[24, 2]), ("w2_b", &[2, 8])];
    let both: Named<'_> = &[("w1_a", &[4, 2]), ("w1_b", &[2, 4]), ("w2_a", &[24, 2]), ("w2_b", &[2, 8])];
    let cases = [
        (file(full, 1e10, "F32"), kron(&w1, 4, &w2, 8), 1.0),
        (file(full, 1e10, "BF16"), kron(&w1, 4, &w2, 8), 1.0),
        (file(second, 1.0, "F32"), scaled(kron(&w1, 4, &w2_low, 8), 0.5), 0.5),
        (file(second, 3.0, "BF16"), scaled(kron(&w1, 4, &w2_low, 8), 1.5), 1.5),
        (file(both, 1.0, "F32"), scaled(kron(&w1_low, 4, &w2_low, 8), 0.5), 0.5),
    ];
    for (file, expected, scale) in cases {
        let plan = file.plan(&fused());
        check_applied(&plan);
        assert_eq!(plan.targets[0].scale, scale);
        assert!(change(&plan.targets[0]).iter().all(|n| n.is_finite()));
        close(&change(&plan.targets[0]), &expected);
        // Apart: rows of the whole product, which no cut of a factor would give.
        let plan = file.plan(&apart());
        check_applied(&plan);
        for (number, part) in ["q", "k", "v"].iter().enumerate() {
            let target = plan.targets.iter().find(|target| target.layer.ends_with(part)).unwrap();
            let first = 32 * number as u64;
            assert_eq!(target.cut, Some(first..first + 32));
            close(&change(target), &expected[1024 * number..1024 * (number + 1)]);
        }
    }
    assert_eq!(file(full, 1e10, "F32").plan(&fused()).notes.len(), 1);
}

#[test]
fn factors_that_are_alone_or_twice_are_refused() {
    let cases: &[(Named<'_>, &str)] = &[
        (&[("w1", &[4, 4])], "no part \"w2\""),
        (&[("w2", &[24, 8])], "no part \"w1\""),
        (&[("w1", &[4, 4]), ("w2_a", &[24, 2])], "one factor of two"),
        (&[("w1", &[4, 4]), ("w2", &[24, 8]), ("w2_a", &[24, 2]), ("w2_b", &[2, 8])], "whole and as factors"),
        (&[("w1", &[4, 4]), ("w2_a", &[24, 2]), ("w2_b", &[3, 8])], "do not belong together"),
        (&[("w1_a", &[4, 1]), ("w1_b", &[1, 4]), ("w2_a", &[24, 2]), ("w2_b", &[2, 8])], "ranks 1 and 2"),
        (&[("w1", &[4, 4]), ("w2", &[25, 8])], "is [100, 32]"),
        (&[("w1", &[1 << 40, 1 << 40]), ("w2", &[1 << 40, 1 << 40])], "holds no numbers"),
    ];
    for (parts, why) in cases {
        let plan = file(parts, 1.0, "F32").plan(&fused());
        assert_eq!((plan.targets.len(), plan.refused.len()), (0, parts.len() + 1));
        assert!(reasons(&plan).contains(why), "{why}: {}", plan.report());
    }
}
