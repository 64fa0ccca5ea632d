//! Planning without a device: what does not fit is refused by name before anything is launched, and long weights are cut.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use checkpoint::gguf::GgmlType;
use common::Case;
use common::corpus::blocks;
use common::made::weight;
use gpu_driver::{Bytes, DeviceAddress};
use quant_kernels::{
    DevicePart, DeviceTarget, Family, KernelError, Kernels, Launch, Result, TargetKind, plan,
};
use quant_router::formats::{Bnb4, BnbKind, Codes, Family as Name, Global, PackedInt, Scaled, Scales, Words};
use quant_router::{Format, PartRole, QuantError};

/// Plans with every part at one place, as long as it is.
fn planned(case: &Case, address: u64, rows: std::ops::Range<u64>, kind: TargetKind) -> Result<Vec<Launch>> {
    let parts: Vec<_> = case
        .parts
        .iter()
        .map(|(tensor, bytes)| DevicePart {
            tensor,
            address: DeviceAddress(address),
            size: Bytes(bytes.len() as u64),
        })
        .collect();
    let numbers = rows.end.saturating_sub(rows.start) * case.weight.columns();
    let target = DeviceTarget { address: DeviceAddress(1 << 30), size: Bytes(numbers * kind.bytes()), kind };
    plan(&case.weight, &parts, rows, target)
}

fn q8(rows: u64) -> Case {
    blocks("q8", GgmlType::Q8_0, &[rows, 64], vec![0; (rows * 68) as usize])
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let case = q8(3);
    let kind = TargetKind::Bf16;
    let text = |launches: Result<Vec<Launch>>| launches.unwrap_err().to_string();
    assert_eq!(
        text(planned(&case, 1 << 20, 1..4, kind)),
        "rows 1..4 of \"layer.weight\" were asked for, which has 3"
    );
    let mut cut = case.clone();
    cut.parts.get_mut("layer.weight").unwrap().pop();
    assert!(text(planned(&cut, 1 << 20, 0..3, kind)).contains("has 203 bytes and needs 204"));
    cut.parts.clear();
    assert!(text(planned(&cut, 1 << 20, 0..3, kind)).contains("was not given"));
    let part = DevicePart { tensor: "layer.weight", address: DeviceAddress(1 << 20), size: Bytes(204) };
    let target = |address, size| DeviceTarget { address: DeviceAddress(address), size: Bytes(size), kind };
    let small = plan(&case.weight, &[part], 0..3, target(0, 382)).unwrap_err();
    assert!(
        matches!(small, KernelError::Quant(QuantError::TargetSize { have: 191, need: 192, .. })),
        "{small}"
    );
    let odd = plan(&case.weight, &[part], 0..3, target(1, 384)).unwrap_err().to_string();
    assert_eq!(odd, "the target of \"layer.weight\" is at 0x1, which is no multiple of 2");
}

#[test]
fn numbers_at_odd_addresses_are_refused_and_packed_bytes_are_not() {
    let format = |scales, family| {
        Format::Scaled(Scaled { family, codes: Codes::Int8, scales, global: Global::None, zero_point: false })
    };
    let scaled = weight(
        "scaled",
        &[4, 32],
        format(Scales::Row, Name::Int8),
        &[(PartRole::Data, "I8"), (PartRole::Scale, "F32")],
    );
    let refused = planned(&scaled, 2, 0..4, TargetKind::F32).unwrap_err();
    assert!(matches!(refused, KernelError::Misaligned { need: 4, .. }), "{refused}");
    let plain = weight("plain", &[4, 32], format(Scales::None, Name::Int8), &[(PartRole::Data, "I8")]);
    assert_eq!(planned(&plain, 3, 0..4, TargetKind::F32).unwrap().len(), 1);
    assert_eq!(planned(&q8(4), 5, 0..4, TargetKind::F32).unwrap().len(), 1);
}

#[test]
fn what_no_kernel_decodes_is_told_apart() {
    let bits = Format::QuantoBits(quant_router::formats::QuantoBits { bits: 3, group: 8 });
    let mut case = q8(2);
    case.weight.format = bits;
    let refused = planned(&case, 0, 0..2, TargetKind::F16).unwrap_err();
    assert!(matches!(refused, KernelError::Unsupported { .. }), "{refused}");
    assert!(!Kernels::supports(&case.weight));
    assert!(Kernels::supports(&q8(2).weight));
    // More elements than can be counted in blocks of this length.
    let mut long = weight(
        "long",
        &[2, 64],
        Format::Bnb4(Bnb4 { kind: BnbKind::Nf4, block: 64, nested: None }),
        &[(PartRole::Data, "U8"), (PartRole::Codebook, "F32"), (PartRole::Scale, "F32")],
    );
    long.weight.shape = vec![1 << 20, 1 << 13];
    assert!(Kernels::supports(&long.weight));
    long.weight.format = Format::Bnb4(Bnb4 { kind: BnbKind::Nf4, block: 1 << 40, nested: None });
    assert!(!Kernels::supports(&long.weight));
}

/// Words of eight columns, 64 rows of 256, by 128.
fn words(words: Words) -> Case {
    let (bits, group, indexed, zero_less_one, symmetric) = (4, 128, false, true, false);
    let format = PackedInt { bits, words, group, indexed, zero_less_one, symmetric };
    let parts = [(PartRole::Data, "I32"), (PartRole::Scale, "F16"), (PartRole::ZeroPoint, "I32")];
    weight("words", &[64, 256], Format::PackedInt(format), &parts)
}

#[test]
fn integers_in_words_are_planned_by_tiles_and_refused_where_words_are_cut() {
    let launch = |layout, rows| {
        let launches = planned(&words(layout), 1 << 20, rows, TargetKind::Bf16).unwrap();
        let [launch] = &launches[..] else { panic!("{launches:?}") };
        (launch.family, launch.kernel, launch.blocks)
    };
    assert_eq!(launch(Words::Columns, 0..64), (Family::Gptq, "gptq4", 2));
    assert_eq!(launch(Words::Along, 63..64), (Family::Compressed, "compressed4", 1));
    assert_eq!(launch(Words::Rows, 5..7), (Family::Awq, "awq_gemm", 2));
    assert!(planned(&words(Words::Columns), 1 << 20, 9..9, TargetKind::Bf16).unwrap().is_empty());
    let refused = |change: fn(&mut Case)| {
        let mut case = words(Words::Columns);
        change(&mut case);
        assert!(!Kernels::supports(&case.weight));
        planned(&case, 1 << 20, 0..1, TargetKind::Bf16).unwrap_err()
    };
    for error in [
        refused(|case| case.weight.shape = vec![60, 256]),
        refused(|case| case.weight.shape = vec![2, 32, 256]),
        refused(|case| case.weight.shape = vec![1 << 29, 8]),
        refused(|case| {
            let Format::PackedInt(format) = &mut case.weight.format else { panic!() };
            format.bits = 5;
        }),
    ] {
        assert!(matches!(error, KernelError::Unsupported { .. }), "{error}");
    }
    let mut small = words(Words::Columns);
    small.parts.values_mut().for_each(|bytes| bytes.truncate(4));
    assert!(matches!(
        planned(&small, 1 << 20, 0..1, TargetKind::Bf16),
        Err(KernelError::Quant(QuantError::PartSize { .. }))
    ));
    let odd = planned(&words(Words::Rows), 2, 0..64, TargetKind::Bf16).unwrap_err();
    assert!(matches!(odd, KernelError::Misaligned { need: 4, .. }), "{odd}");
}

#[test]
fn matrix_instructions_are_for_narrow_targets_and_aligned_parts() {
    for case in common::made::svdq() {
        let kernel = |address, kind| {
            let launches = planned(&case, address, 0..128, kind).unwrap();
            assert_eq!(launches.len(), 1);
            launches[0].family
        };
        let narrow =
            if case.name.contains("svdq 16 [128") { Family::Nunchaku } else { Family::NunchakuMatrix };
        assert_eq!(kernel(1 << 20, TargetKind::F32), Family::Nunchaku, "{}", case.name);
        assert_eq!(kernel(1 << 20, TargetKind::Bf16), narrow, "{}", case.name);
        assert_eq!(kernel(1 << 20, TargetKind::F16), narrow, "{}", case.name);
        assert_eq!(kernel((1 << 20) + 8, TargetKind::F16), Family::Nunchaku, "{}", case.name);
    }
}

#[test]
fn bytes_of_quanto_are_read_once_for_all_their_numbers() {
    for case in common::made::formats().iter().filter(|case| case.name.starts_with("quanto")) {
        let rows = case.weight.rows().unwrap();
        let whole = planned(case, 1 << 20, 0..rows, TargetKind::Bf16).unwrap().len();
        // The last bytes may hold fewer numbers than the others.
        assert!(whole == 1 || whole == 2 && !case.name.contains("[96"), "{}", case.name);
        assert!(planned(case, 1 << 20, 1..rows, TargetKind::Bf16).unwrap().len() <= 3);
    }
}

#[test]
fn rows_without_elements_launch_nothing() {
    assert!(planned(&q8(3), 0, 1..1, TargetKind::F32).unwrap().is_empty());
    let empty = blocks("empty", GgmlType::Q8_0, &[0, 64], Vec::new());
    assert!(planned(&empty, 0, 0..0, TargetKind::F32).unwrap().is_empty());
    let narrow = blocks("narrow", GgmlType::Q8_0, &[7, 0], Vec::new());
    assert!(planned(&narrow, 0, 2..5, TargetKind::F32).unwrap().is_empty());
}

#[test]
fn a_weight_of_more_than_two_to_the_thirty_elements_is_launched_in_pieces() {
    let case = blocks("embedding", GgmlType::Q4_0, &[300_000, 8192], Vec::new());
    let size = 300_000 * 8192 / 32 * 18;
    let part = DevicePart { tensor: "layer.weight", address: DeviceAddress(1 << 40), size: Bytes(size) };
    let numbers = 300_000 * 8192;
    let target =
        DeviceTarget { address: DeviceAddress(1 << 44), size: Bytes(numbers * 2), kind: TargetKind::F16 };
    let launches = plan(&case.weight, &[part], 0..300_000, target).unwrap();
    assert_eq!(launches.len(), 3);
    let pair = |word: u64| (word & 0xffff_ffff, word >> 32);
    let (mut element, mut read) = (0, 0);
    for launch in &launches {
        assert_eq!((launch.family, launch.kernel), (Family::GgmlSimple, "q4_0"));
        let [data, out, bytes, range, ..] = launch.argument[..] else { panic!("{launch:?}") };
        let ((bytes, begin), (first, end)) = (pair(bytes), pair(range));
        assert_eq!((data, out), ((1 << 40) + element / 32 * 18, (1 << 44) + element * 2));
        assert_eq!((begin, first), (0, 0));
        read += bytes;
        element += end - first;
    }
    assert_eq!((element, read), (numbers, size));
}

#[test]
fn modules_are_for_old_drivers_and_hold_every_kernel() {
    for family in Family::ALL {
        let ptx = family.ptx();
        assert!(ptx.lines().any(|line| line == ".version 8.7"), "{}", family.name());
        let target = if family.before().is_some() { ".target sm_80" } else { ".target sm_75" };
        assert!(ptx.lines().any(|line| line == target), "{}", family.name());
    }
    for case in common::cases() {
        let rows = case.weight.rows().unwrap();
        for kind in TargetKind::ALL {
            for launch in planned(&case, 1 << 20, 0..rows, kind).unwrap() {
                let entry = format!(".entry {}_{}(", launch.kernel, kind.name());
                assert!(launch.family.ptx().contains(&entry), "{entry}");
                let size = format!("param_0[{}]", launch.argument.len() * 8);
                let kernel = launch.family.ptx().split(&entry).nth(1).unwrap();
                assert!(
                    kernel.lines().nth(1).unwrap().contains(&size),
                    "{entry} takes another struct than {size}"
                );
            }
        }
    }
}
