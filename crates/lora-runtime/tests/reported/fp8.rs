//! Factors in FP8, and what is no number of an adapter.

use crate::common::{File, check_applied, linear, model, reasons};

/// A file of FP8 factors: <https://github.com/kohya-ss/musubi-tuner/issues/580>,
/// <https://github.com/Comfy-Org/ComfyUI/issues/4577>, <https://github.com/Comfy-Org/ComfyUI/issues/12405>,
/// <https://github.com/nunchux-ai/nunchaku/issues/245>, <https://github.com/Comfy-Org/ComfyUI/issues/10910>
#[test]
fn factors_and_alphas_may_be_fp8() {
    let layers = model([linear("w", 32, 32)]);
    for (factor, alpha) in [("F8_E4M3", "F8_E4M3"), ("F8_E4M3", "F16"), ("F8_E5M2", "F32")] {
        let mut file = File::default()
            .with("w.lora_down.weight", factor, &[4, 32])
            .with("w.lora_up.weight", factor, &[32, 4])
            .with("w.alpha", alpha, &[]);
        file.scalars.insert("w.alpha".into(), 2.0);
        let plan = file.plan(&layers);
        check_applied(&plan);
        assert_eq!((plan.targets.len(), plan.targets[0].scale), (1, 0.5));
    }
    for dtype in ["I8", "U8", "BOOL", "F8_E8M0", "C64", "Q4_0", ""] {
        let file = File::default().with("w.lora_down.weight", dtype, &[4, 32]).with(
            "w.lora_up.weight",
            "BF16",
            &[32, 4],
        );
        let plan = file.plan(&layers);
        assert_eq!((plan.refused.len(), plan.targets.len()), (2, 0), "{dtype}: {}", plan.report());
        assert!(reasons(&plan).contains("is no type"), "{}", plan.report());
    }
    // A scale beside a factor would change its numbers.
    let scaled = File::default().peft("w", 32, 32, 4).with("w.lora_A.weight_scale", "F32", &[]).plan(&layers);
    assert_eq!(scaled.refused.len(), 1);
}
