//! Numbers packed in words, in shapes and groups that files rarely have: edges of tiles, groups that end among the columns of a thread or
//! are in no order, groups that there are not.

use std::collections::{BTreeMap, BTreeSet};

use quant_router::formats::{PackedInt, Words};
use quant_router::{Format, PartRole};

use super::made::weight;
use super::{Case, noise};

/// Which group a column is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Worked out.
    None,
    /// Named, as most files of GPTQ do, in order.
    Sorted,
    /// Named, in no order; some groups are not there.
    Mixed,
    /// Named, in order but from column 256 on.
    Late,
}

fn case(
    words: Words,
    bits: u32,
    shape: [u64; 2],
    group: u64,
    order: Order,
    scale: &str,
    zero: Option<bool>,
) -> Case {
    let format = PackedInt {
        bits,
        words,
        group,
        indexed: order != Order::None,
        zero_less_one: zero == Some(true),
        symmetric: zero.is_none(),
    };
    let mut parts = vec![(PartRole::Data, "I32"), (PartRole::Scale, scale)];
    parts.extend(zero.map(|_| (PartRole::ZeroPoint, "I32")));
    parts.extend((order != Order::None).then_some((PartRole::GroupIndex, "I32")));
    let name = format!("{words:?} {bits} bits by {group} {order:?} {scale} {zero:?}");
    let mut case = weight(&name, &shape, Format::PackedInt(format), &parts);
    if let Some(index) = case.weight.part(PartRole::GroupIndex).map(|part| part.tensor.clone()) {
        let groups = shape[1].div_ceil(group) as u32;
        let random = noise(5, shape[1] as usize);
        let of = |(column, byte): (usize, &u8)| match order {
            Order::Late if column < 256 => (column as u64 / group) as u32,
            Order::Mixed if column == 3 => u32::MAX,
            Order::Mixed | Order::Late => u32::from(*byte) % (groups + u32::from(column % 16 == 0)),
            _ => (column as u64 / group) as u32,
        };
        let named = random.iter().enumerate().flat_map(|at| of(at).to_le_bytes());
        case.parts.insert(index, named.collect());
    }
    case
}

/// The parts with an index that names only groups that there are, and the columns that another group was named for.
pub(crate) fn in_known_groups(case: &Case) -> (BTreeMap<String, Vec<u8>>, BTreeSet<usize>) {
    let (mut parts, mut lost) = (case.parts.clone(), BTreeSet::new());
    if let (Format::PackedInt(format), Some(index)) =
        (&case.weight.format, case.weight.part(PartRole::GroupIndex))
    {
        let groups = case.weight.columns().div_ceil(format.group);
        for (column, named) in
            parts.get_mut(&index.tensor).unwrap().as_chunks_mut::<4>().0.iter_mut().enumerate()
        {
            if u64::from(u32::from_le_bytes(*named)) >= groups {
                *named = [0; 4];
                lost.insert(column);
            }
        }
    }
    (parts, lost)
}

/// All of them.
pub(crate) fn all() -> Vec<Case> {
    use Order::{Late, Mixed, None as Worked, Sorted};
    let mut cases = Vec::new();
    for bits in [2, 3, 4, 8] {
        for (shape, group, order, scale, zero) in [
            ([96, 288], 128, Worked, "F16", Some(true)),
            ([64, 384], 128, Sorted, "F16", Some(true)),
            ([160, 544], 32, Sorted, "BF16", Some(false)),
            ([32, 416], 32, Mixed, "F16", Some(true)),
            ([224, 32], 32, Worked, "F32", Some(false)),
            ([96, 160], 24, Worked, "F16", None),
            ([32, 128], 1, Mixed, "F32", None),
            ([64, 160], 1, Mixed, "F16", Some(true)),
            ([64, 1088], 32, Mixed, "BF16", Some(true)),
            ([32, 512], 64, Late, "F16", Some(true)),
            ([32, 192], 1 << 40, Sorted, "BF16", Some(true)),
        ] {
            cases.push(case(Words::Columns, bits, shape, group, order, scale, zero));
        }
        for (shape, group, order, scale, zero) in [
            ([70, 256], 128, Worked, "BF16", None),
            ([65, 301], 32, Worked, "F16", Some(false)),
            ([64, 384], 384, Worked, "F32", Some(false)),
            ([131, 96], 32, Mixed, "BF16", Some(false)),
            ([3, 40], 8, Worked, "BF16", None),
            ([100, 7], 3, Mixed, "F16", None),
            ([9, 520], 128, Sorted, "BF16", Some(false)),
        ] {
            cases.push(case(Words::Along, bits, shape, group, order, scale, zero));
        }
    }
    // Of a number of rows that is no multiple of a tile's, of one whose words lie at no multiples of 16, and more columns than a tile's.
    for (shape, group, order, scale, zero) in [
        ([256, 256], 128, Worked, "F16", Some(false)),
        ([160, 320], 32, Worked, "BF16", Some(false)),
        ([136, 130], 64, Worked, "F16", Some(true)),
        ([8, 7], 3, Worked, "F32", Some(false)),
        ([64, 136], 24, Mixed, "F16", Some(false)),
        ([96, 40], 20, Worked, "F16", None),
    ] {
        cases.push(case(Words::Rows, 4, shape, group, order, scale, zero));
    }
    cases
}
