//! Random files in which nothing fits together, and files that almost do: the body of the fuzz target for detection on what no
//! byte-wise mutation finds soon.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Map, json};

#[path = "../fuzz/targets/detection.rs"]
mod detection;

/// What may follow a layer's name.
const ENDINGS: &[&str] = &[
    ".weight",
    ".weight",
    ".weight",
    ".weight_scale",
    ".weight_scale",
    ".weight_scale_inv",
    ".scale_weight",
    ".weight_scale_2",
    ".input_scale",
    ".scale_input",
    ".alpha",
    ".input_global_scale",
    ".input_absmax",
    ".weight_global_scale",
    ".pre_quant_scale",
    ".comfy_quant",
    ".comfy_quant",
    ".weight._data",
    ".weight._data._data",
    ".weight._scale",
    ".weight._shift",
    ".weight.absmax",
    ".weight.quant_map",
    ".weight.nested_absmax",
    ".weight.nested_quant_map",
    ".weight.quant_state.bitsandbytes__nf4",
    ".weight.quant_state.bitsandbytes__fp4",
    ".SCB",
    ".weight_format",
    ".weight_s_rel",
    ".weight_s_channel",
    ".weight_codebook",
    ".weight_correction",
    "._weight_qdata",
    "._weight_scale",
    "._weight_zero_point",
    ".qweight",
    ".qzeros",
    ".scales",
    ".g_idx",
    ".weight_packed",
    ".weight_packed",
    ".weight_shape",
    ".weight_shape",
    ".weight_zero_point",
    ".weight_g_idx",
    ".wscales",
    ".wzeros",
    ".smooth_factor",
    ".proj_down",
    ".proj_up",
    ".bias",
    "",
];
const DTYPES: &[(&str, u64)] = &[
    ("F8_E4M3", 1),
    ("F8_E4M3", 1),
    ("F8_E5M2", 1),
    ("U8", 1),
    ("U8", 1),
    ("I8", 1),
    ("F32", 4),
    ("F32", 4),
    ("BF16", 2),
    ("F16", 2),
    ("F8_E8M0", 1),
    ("I32", 4),
];
const LENGTHS: &[u64] = &[0, 1, 2, 3, 4, 8, 16, 32, 64, 128, 256];
const TEXTS: &[&str] = &[
    "",
    "{}",
    "[]",
    "\u{0}\u{0}",
    r#"{"format":"nvfp4"}"#,
    r#"{"format":"mxfp8"}"#,
    r#"{"format":"float8_e4m3fn"}"#,
    r#"{"format":"int8_tensorwise","convrot":true,"convrot_groupsize":4}"#,
    r#"{"convrot":true}"#,
    r#"{"quant_type":"nf4","blocksize":4,"shape":[4,8]}"#,
    r#"{"quant_type":"fp4","blocksize":64,"shape":[4,4],"nested_blocksize":2,"nested_offset":0.5}"#,
];
const MAPS: &[&str] = &[
    "{}",
    r#"{"a":{"weights":"qint8"}}"#,
    r#"{"a":{"weights":"qint4"},"b":{"weights":"qint2"}}"#,
    r#"{"a.weight":{"weights":"qfloat8"}}"#,
];

/// A tensor: name, dtype with its size, shape, and the text that its bytes are, if it is one.
type Tensor = (String, (&'static str, u64), Vec<u64>, Option<&'static str>);

fn tensor() -> impl Strategy<Value = Tensor> {
    let text = prop_oneof![2 => Just(None), 1 => select(TEXTS).prop_map(Some)];
    let name = (select(&["a", "b", "model.a"][..]), select(ENDINGS))
        .prop_map(|(layer, ending)| format!("{layer}{ending}"));
    (name, select(DTYPES), prop::collection::vec(select(LENGTHS), 0..4), text)
}

/// A layer that fits together, with numbers of rows and columns that may be anything.
fn layer() -> impl Strategy<Value = Vec<Tensor>> {
    let kind = 0_usize..13;
    (select(&["c", "d"][..]), kind, select(LENGTHS), select(LENGTHS), select(LENGTHS)).prop_map(
        |(name, kind, rows, columns, blocks)| {
            let of = |ending: &str, dtype: &'static str, size: u64, shape: &[u64]| {
                (format!("{name}.{ending}"), (dtype, size), shape.to_vec(), None)
            };
            let tiles = |columns: u64| [rows.next_multiple_of(128), columns.next_multiple_of(4)];
            match kind {
                0 => {
                    vec![of("weight", "F8_E4M3", 1, &[rows, columns]), of("weight_scale", "F32", 4, &[rows])]
                }
                1 => vec![
                    of("weight", "I8", 1, &[rows, columns]),
                    of("weight_scale", "BF16", 2, &[rows, blocks]),
                ],
                2 => vec![
                    of("weight", "U8", 1, &[rows, columns]),
                    of("weight_scale", "F8_E4M3", 1, &tiles(columns / 8)),
                    of("weight_scale_2", "F32", 4, &[]),
                ],
                3 => vec![
                    of("weight", "F8_E5M2", 1, &[rows, columns]),
                    of("weight_scale", "U8", 1, &tiles(columns / 32)),
                ],
                4 => vec![
                    of("weight._data._data", "U8", 1, &[rows, columns]),
                    of("weight._scale", "F16", 2, &[rows * 2]),
                    of("weight._shift", "I8", 1, &[rows * 2, 1]),
                ],
                5 => vec![
                    of("weight", "I8", 1, &[rows, columns]),
                    of("weight_s_rel", "F32", 4, &[rows, blocks]),
                    of("weight_s_channel", "F32", 4, &[rows]),
                    (
                        format!("{name}.comfy_quant"),
                        ("U8", 1),
                        Vec::new(),
                        Some(r#"{"format":"w4a8_int8","convrot_groupsize":4}"#),
                    ),
                ],
                6 => vec![
                    of("_weight_qdata", "I8", 1, &[rows, columns]),
                    of("_weight_scale", "F32", 4, &[rows, blocks]),
                    of("_weight_zero_point", "I8", 1, &[rows, blocks]),
                ],
                7 => vec![
                    of("qweight", "I32", 4, &[rows / 4, columns / 2]),
                    of("wscales", "BF16", 2, &[columns / 64, rows]),
                    of("wzeros", "F16", 2, &[columns / 64, rows]),
                ],
                8 => vec![
                    of("qweight", "I8", 1, &[rows, columns / 2]),
                    of("wscales", "BF16", 2, &[columns / 64, rows]),
                    of("smooth_factor", "BF16", 2, &[columns]),
                    of("proj_down", "BF16", 2, &[columns, blocks]),
                    of("proj_up", "BF16", 2, &[rows, blocks]),
                ],
                9 => vec![
                    of("weight_packed", "I32", 4, &[rows, columns.div_ceil(8)]),
                    of("weight_scale", "BF16", 2, &[rows, blocks]),
                    of("weight_shape", "I64", 8, &[rows, columns]),
                    of("weight_zero_point", "I32", 4, &[rows.div_ceil(8), blocks]),
                ],
                10 => vec![
                    of("qweight", "I32", 4, &[columns / 32 * 3, rows]),
                    of("qzeros", "I32", 4, &[blocks, rows / 32 * 3]),
                    of("scales", "F16", 2, &[blocks, rows]),
                ],
                11 => vec![
                    of("weight", "F8_E4M3", 1, &[blocks, rows, columns]),
                    of("weight_scale_inv", "F32", 4, &[blocks, rows.div_ceil(128), columns.div_ceil(128)]),
                ],
                _ => vec![of("weight", "I8", 1, &[rows, columns]), of("SCB", "F32", 4, &[rows])],
            }
        },
    )
}

/// The bytes of a safetensors file. The first of several tensors of one name stays.
fn file(tensors: &[Tensor], map: Option<&str>) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, (dtype, size), shape, text) in tensors {
        if header.contains_key(name) {
            continue;
        }
        let start = data.len();
        let shape = match text {
            Some(text) => {
                data.extend_from_slice(text.as_bytes());
                header.insert(
                    name.clone(),
                    json!({"dtype": "U8", "shape": [text.len()], "data_offsets": [start, data.len()]}),
                );
                continue;
            }
            None => shape,
        };
        if name.ends_with(".weight_shape") {
            // Numbers that may be a shape.
            let numbers = [shape.first(), shape.last()].map(|length| length.copied().unwrap_or(1));
            data.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
            header.insert(
                name.clone(),
                json!({"dtype": "I64", "shape": [2], "data_offsets": [start, data.len()]}),
            );
            continue;
        }
        let bytes = shape.iter().product::<u64>() * size;
        data.extend((0..bytes).map(|index| (index * 37 + 11) as u8));
        header.insert(
            name.clone(),
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, data.len()]}),
        );
    }
    if let Some(map) = map {
        let class = r#"{"_type":"Int8Tensor","_data":{"block_size":[1,16]},"_tensor_data_names":["qdata","scale","zero_point"]}"#;
        header.insert(
            "__metadata__".into(),
            json!({ "quantization_map": map, "c.weight": class, "a.weight": class }),
        );
    }
    let header = serde_json::Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn detection_of_chaos(
        tensors in prop::collection::vec(tensor(), 0..7),
        layers in prop::collection::vec(layer(), 0..3),
        map in prop::option::weighted(0.4, select(MAPS)),
    ) {
        // Too large for a test of many files.
        let size = |tensor: &Tensor| tensor.2.iter().product::<u64>() * tensor.1.1;
        let all: Vec<Tensor> = layers.into_iter().flatten().chain(tensors).filter(|tensor| size(tensor) < 1 << 17).collect();
        detection::run(&file(&all, map));
    }
}
