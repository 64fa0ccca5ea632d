//! Weights of random bytes in shapes that files rarely have: blocks that run over the ends of rows, rows of odd lengths, blocks that
//! edges cut, groups of one element, more elements than a tile.

use std::collections::BTreeMap;

use checkpoint::TensorType;
use checkpoint::gguf::GgmlType;
use checkpoint::safetensors::dtype_from_name;
use gpu_driver::{Bytes, DeviceAddress};
use quant_kernels::{DevicePart, DeviceTarget, KernelError, TargetKind, plan};
use quant_router::formats::{
    Bnb4, BnbKind, Codes, Family, Global, Nested, Order, QuantoBits, Scaled, Scales, Svdq, SvdqKind, W4A8,
};
use quant_router::{Format, Part, PartRole, QuantError, QuantWeight};

use super::corpus::blocks;
use super::{Case, noise};

/// Every type in rows of whole blocks, of parts of blocks, and of odd lengths.
pub(crate) fn ggml() -> Vec<Case> {
    let mut cases = Vec::new();
    for (seed, kind) in GgmlType::all().filter(|kind| kind.is_quantized()).enumerate() {
        let elements = kind.block_elements();
        // More than two tiles of the narrow targets; all three have whole blocks in all.
        for shape in [vec![9, 8 * elements.max(256)], vec![elements, 37], vec![3, elements / 8, 2, 12]] {
            let blocks_in_all = shape.iter().product::<u64>() / elements;
            let bytes = noise(seed as u32, (blocks_in_all * kind.block_bytes()) as usize);
            cases.push(blocks(&format!("{kind} {shape:?}"), kind, &shape, bytes));
        }
    }
    cases
}

/// A weight of random bytes. Parts are as long as the kernels need them; that decoders need the same is seen when they decode.
pub(crate) fn weight(name: &str, shape: &[u64], format: Format, parts: &[(PartRole, &str)]) -> Case {
    let part = |(role, kind): &(PartRole, &str)| Part {
        role: *role,
        tensor: format!("{name} {role}"),
        kind: TensorType::Plain(dtype_from_name(kind).unwrap()),
        shape: Vec::new(),
    };
    let parts = parts.iter().map(part).collect();
    let weight =
        QuantWeight { name: name.into(), shape: shape.to_vec(), format, parts, transforms: Vec::new() };
    let size = Bytes(weight.elements().unwrap() * 4);
    let target = DeviceTarget { address: DeviceAddress(0), size, kind: TargetKind::F32 };
    let mut sizes = BTreeMap::<String, u64>::new();
    for _ in 0..=weight.parts.len() {
        let given: Vec<_> = weight
            .parts
            .iter()
            .map(|part| DevicePart {
                tensor: &part.tensor,
                address: DeviceAddress(0),
                size: Bytes(sizes.get(&part.tensor).copied().unwrap_or(u64::MAX)),
            })
            .collect();
        match plan(&weight, &given, 0..weight.rows().unwrap(), target) {
            Err(KernelError::Quant(QuantError::PartSize { tensor, need, .. })) => sizes.insert(tensor, need),
            Err(other) => panic!("{name}: {other}"),
            Ok(_) => break,
        };
    }
    let bytes = |(seed, part): (usize, &Part)| {
        (part.tensor.clone(), noise(seed as u32 + 77, sizes[&part.tensor] as usize))
    };
    let parts = weight.parts.iter().enumerate().map(bytes).collect();
    Case { name: format!("{name} {shape:?}"), weight, parts }
}

fn scaled(
    name: &str,
    shape: &[u64],
    family: Family,
    codes: Codes,
    scales: Scales,
    parts: &[(PartRole, &str)],
) -> Case {
    let has = |role| parts.iter().any(|(other, _)| *other == role);
    let global = match (has(PartRole::GlobalScale), has(PartRole::InputScale)) {
        (true, true) if codes == Codes::E2m1Low => Global::TimesInput,
        (true, true) => Global::InverseOfInput,
        (true, false) if codes == Codes::E2m1Low => Global::Divisor,
        (true, false) => Global::Factor,
        _ if family == Family::BnbInt8 => Global::Per127,
        _ => Global::None,
    };
    let format =
        Format::Scaled(Scaled { family, codes, scales, global, zero_point: has(PartRole::ZeroPoint) });
    weight(name, shape, format, &[&[(PartRole::Data, "U8")], parts].concat())
}

/// Every other format.
pub(crate) fn formats() -> Vec<Case> {
    use Codes::{E2m1High, E2m1Low, E4m3, E5m2, Int8};
    use PartRole::{GlobalScale, InputScale, Scale, ZeroPoint};
    let grid = |rows, columns, order| Scales::Blocks { rows, columns, order };
    let mut cases = vec![
        scaled("fp8 tensor", &[65, 301], Family::Fp8, E4m3, Scales::Tensor, &[(Scale, "F32")]),
        scaled("fp8 row", &[33, 1030], Family::Fp8, E5m2, Scales::Row, &[(Scale, "F16")]),
        scaled("fp8 none", &[3, 8192], Family::Fp8, E5m2, Scales::None, &[]),
        scaled("fp8 filters", &[16, 5, 3, 3], Family::Fp8, E4m3, Scales::Row, &[(Scale, "BF16")]),
        scaled("fp8 blocks", &[200, 333], Family::Fp8, E4m3, grid(128, 128, Order::Rows), &[(Scale, "F32")]),
        scaled("fp8 whole", &[260, 384], Family::Fp8, E4m3, grid(128, 128, Order::Rows), &[(Scale, "F32")]),
        scaled("fp8 narrow", &[90, 340], Family::Fp8, E5m2, grid(7, 17, Order::Columns), &[(Scale, "F32")]),
        scaled("fp8 column", &[7, 640], Family::Fp8, E4m3, grid(3, 5, Order::Columns), &[(Scale, "F32")]),
        scaled("int8 row", &[41, 777], Family::Int8, Int8, Scales::Row, &[(Scale, "F32")]),
        scaled("int8 vector", &[9000], Family::Int8, Int8, Scales::Row, &[(Scale, "F32")]),
        scaled("bnb int8", &[64, 256], Family::BnbInt8, Int8, Scales::Row, &[(Scale, "F32")]),
        scaled(
            "int8 zero point",
            &[12, 96],
            Family::TorchAo,
            Int8,
            grid(1, 32, Order::Rows),
            &[(Scale, "BF16"), (ZeroPoint, "I8")],
        ),
        scaled("mxfp8", &[130, 352], Family::MxFp8, E4m3, grid(1, 32, Order::Swizzled), &[(Scale, "U8")]),
        scaled("mxfp8 rows", &[130, 352], Family::MxFp8, E5m2, grid(1, 32, Order::Rows), &[(Scale, "U8")]),
        scaled(
            "nvfp4",
            &[129, 208],
            Family::NvFp4,
            E2m1High,
            grid(1, 16, Order::Swizzled),
            &[(Scale, "F8_E4M3"), (GlobalScale, "F32")],
        ),
        scaled(
            "nvfp4 inputs",
            &[64, 1040],
            Family::NvFp4,
            E2m1Low,
            grid(1, 16, Order::Swizzled),
            &[(Scale, "F8_E4M3"), (GlobalScale, "F32"), (InputScale, "F32")],
        ),
        scaled(
            "nvfp4 inverse",
            &[10, 64],
            Family::NvFp4,
            E2m1High,
            grid(1, 16, Order::Rows),
            &[(Scale, "F8_E4M3"), (GlobalScale, "F32"), (InputScale, "F32")],
        ),
    ];
    for shape in [[70, 96], [9, 40]] {
        let (divided, parts) = (grid(1, 16, Order::Rows), [(Scale, "F8_E4M3"), (GlobalScale, "F32")]);
        cases.push(scaled("nvfp4 divided", &shape, Family::NvFp4, E2m1Low, divided, &parts));
    }
    cases.extend(by_fours());
    cases.extend(packed());
    cases.extend(tiled());
    cases
}

/// Formats of many scales, of which each row has a multiple of four.
fn by_fours() -> Vec<Case> {
    use Codes::{E2m1High, E2m1Low, E4m3};
    use PartRole::{GlobalScale, InputScale, Scale};
    let grid = |columns, order| Scales::Blocks { rows: 1, columns, order };
    let (scale, global, input) = ((Scale, "F8_E4M3"), (GlobalScale, "F32"), (InputScale, "F32"));
    let swizzled = Order::Swizzled;
    vec![
        scaled("nvfp4 fours", &[133, 1088], Family::NvFp4, E2m1High, grid(16, swizzled), &[scale, global]),
        scaled(
            "nvfp4 rows",
            &[70, 320],
            Family::NvFp4,
            E2m1Low,
            grid(16, Order::Rows),
            &[scale, global, input],
        ),
        scaled("nvfp4 alone", &[5, 64], Family::NvFp4, E2m1Low, grid(16, Order::Rows), &[scale]),
        scaled("mxfp8 fours", &[130, 384], Family::MxFp8, E4m3, grid(32, swizzled), &[(Scale, "U8")]),
        scaled("mxfp8 fours", &[40, 640], Family::MxFp8, E4m3, grid(32, Order::Rows), &[(Scale, "U8")]),
    ]
}

/// Numbers of 4 and 2 bits.
fn packed() -> Vec<Case> {
    use PartRole::{Codebook, Correction, Data, GlobalScale, GroupScale, Scale, ScaleCodebook, ZeroPoint};
    let mut cases = Vec::new();
    for (block, shape) in [(64, [100, 192]), (7, [33, 35]), (4096, [5, 4001])] {
        let plain = Bnb4 { kind: BnbKind::Nf4, block, nested: None };
        let parts = [(Data, "U8"), (Codebook, "F32"), (Scale, "F32")];
        cases.push(weight("bnb", &shape, Format::Bnb4(plain), &parts));
        let nested = Some(Nested { block: 3, offset_bits: 0x3e12_3456 });
        let nested = Bnb4 { kind: BnbKind::Fp4, block, nested };
        let parts =
            [(Data, "U8"), (Codebook, "F32"), (Scale, "U8"), (ScaleCodebook, "F32"), (GlobalScale, "F32")];
        cases.push(weight("bnb nested", &shape, Format::Bnb4(nested), &parts));
    }
    for (bits, group, shape) in [
        (4, 128, [96, 256]),
        (2, 128, [96, 384]),
        (4, 5, [21, 25]),
        (2, 1, [11, 13]),
        (4, 100, [75, 300]),
        (2, 64, [33, 64]),
    ] {
        for (scale, shift) in [("BF16", "BF16"), ("F16", "F16"), ("F32", "F32"), ("BF16", "I8")] {
            let format = Format::QuantoBits(QuantoBits { bits, group });
            let parts = [(Data, "U8"), (Scale, scale), (ZeroPoint, shift)];
            cases.push(weight(&format!("quanto {bits} {scale} {shift}"), &shape, format, &parts));
        }
    }
    for (codebook, correction, group, shape) in
        [(false, false, 64, [40, 512]), (true, true, 128, [33, 256]), (true, false, 3, [17, 18])]
    {
        let format = Format::W4A8(W4A8 { group, codebook, correction });
        let mut parts = vec![(Data, "I8"), (GroupScale, "BF16"), (Scale, "F32")];
        parts.extend(codebook.then_some((Codebook, "I8")));
        parts.extend(correction.then_some((Correction, "BF16")));
        cases.push(weight("w4a8", &shape, format, &parts));
    }
    cases
}

/// Numbers in the order of matrix instructions.
fn tiled() -> Vec<Case> {
    use PartRole::{Data, Scale, ZeroPoint};
    let mut cases: Vec<_> = svdq().iter().map(moderate).collect();
    for (number, shape) in [
        ("BF16", [12, 64]),
        ("F16", [68, 576]),
        ("BF16", [8, 1024]),
        ("F32", [20, 192]),
        ("BF16", [36, 4160]),
    ] {
        let parts = [(Data, "I32"), (Scale, number), (ZeroPoint, number)];
        cases.push(weight("awq", &shape, Format::NunchakuAwq, &parts));
    }
    cases
}

/// Weights of `SVDQuant` whose sums are beyond the range of floats, and are no numbers: random bytes.
pub(crate) fn svdq() -> Vec<Case> {
    use PartRole::{Data, GlobalScale, LowRankDown, LowRankUp, RowScale, Scale, Smooth};
    let mut cases = Vec::new();
    for (kind, rank, number, shape) in [
        (SvdqKind::Int4, 32, "BF16", [128, 384]),
        (SvdqKind::Int4, 80, "F16", [256, 256]),
        (SvdqKind::Int4, 0, "F16", [256, 128]),
        (SvdqKind::Int4, 16, "F32", [128, 128]),
        (SvdqKind::Fp4, 16, "F16", [256, 256]),
        (SvdqKind::Fp4, 48, "BF16", [128, 128]),
    ] {
        let fp4 = kind == SvdqKind::Fp4;
        let scale = if fp4 { "F8_E4M3" } else { number };
        let mut parts = vec![(Data, "I8"), (Scale, scale), (Smooth, number)];
        parts.extend([(LowRankUp, number), (LowRankDown, number)]);
        parts.extend(fp4.then_some((RowScale, number)));
        parts.extend((fp4 && rank == 16).then_some((GlobalScale, "F32")));
        cases.push(weight(&format!("svdq {rank}"), &shape, Format::Svdq(Svdq { kind, rank }), &parts));
    }
    cases
}

/// The same weight with floats between 1/32 and 2, and their negatives.
fn moderate(case: &Case) -> Case {
    let mut case = case.clone();
    for part in &case.weight.parts {
        let bytes = case.parts.get_mut(&part.tensor).unwrap();
        let (size, kept, set): (usize, u8, u8) = match part.kind.to_string().as_str() {
            "BF16" => (2, 0x81, 0x3e),
            "F16" => (2, 0x87, 0x30),
            "F32" => (4, 0x80, 0x3f),
            "F8_E4M3" => (1, 0x8f, 0x20),
            _ => continue,
        };
        bytes.iter_mut().skip(size - 1).step_by(size).for_each(|high| *high = *high & kept | set);
    }
    case
}
