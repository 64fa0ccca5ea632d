//! Files of Nunchaku: `SVDQuant` and AWQ, and what is packed like them.

use super::build::{File, format};

fn svdq(scale: &str, groups: u64) -> File {
    File::default()
        .tensor("a.qweight", "I8", &[256, 64])
        .tensor("a.wscales", scale, &[groups, 256])
        .tensor("a.smooth_factor", "BF16", &[128])
        .tensor("a.smooth_factor_orig", "BF16", &[128])
        .tensor("a.proj_down", "BF16", &[128, 32])
        .tensor("a.proj_up", "BF16", &[256, 32])
        .tensor("a.bias", "BF16", &[256])
}

fn awq() -> File {
    File::default().tensor("a.qweight", "I32", &[3, 64]).tensor("a.wscales", "BF16", &[2, 12]).tensor(
        "a.wzeros",
        "BF16",
        &[2, 12],
    )
}

#[test]
fn both_formats_are_recognised_by_structure() {
    for (file, shape, want) in [
        (svdq("BF16", 2), [256, 128], "SVDQuant INT4 of rank 32"),
        (svdq("F8_E4M3", 8), [256, 128], "SVDQuant FP4 of rank 32"),
        (
            svdq("F8_E4M3", 8).tensor("a.wcscales", "BF16", &[256]).tensor("a.wtscale", "F32", &[]),
            [256, 128],
            "SVDQuant FP4 of rank 32",
        ),
        (awq(), [12, 128], "AWQ with a scale and a shift for 64"),
    ] {
        let detection = file.detect().unwrap();
        assert_eq!(format(&detection, "a.weight"), want);
        assert_eq!(detection.weights["a.weight"].weight.shape, shape);
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    svdq("BF16", 4).refused("a.weight");
    svdq("F32", 2).refused("a.weight");
    svdq("BF16", 2).tensor("a.wcscales", "BF16", &[256]).refused("a.weight");
    svdq("BF16", 2).tensor("a.weight", "BF16", &[256, 128]).refused("a.weight");
    awq().tensor("a.qzeros", "I32", &[1]).refused("a.weight");
    let lost = File::default().tensor("a.qweight", "I32", &[3, 64]).tensor("a.wscales", "BF16", &[2, 12]);
    lost.refused("a.weight");
    let other = File::default().tensor("a.qweight", "I32", &[16, 64]).tensor("a.scales", "F16", &[2, 64]);
    other.refused("a.weight");
    let odd = File::default()
        .tensor("a.qweight", "I8", &[100, 64])
        .tensor("a.wscales", "BF16", &[2, 100])
        .tensor("a.smooth_factor", "BF16", &[128])
        .tensor("a.proj_down", "BF16", &[128, 16])
        .tensor("a.proj_up", "BF16", &[100, 16]);
    odd.refused("a.weight");
}
