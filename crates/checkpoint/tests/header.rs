//! Headers that are right: every type, any legal order, anything that the format allows and writers do.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use checkpoint::safetensors::{dtype_from_name, read_header};
use checkpoint::{CheckpointError, Limits, TensorInfo, TensorType};
use common::{entry, file, model, read, read_within};

const TYPES: [&str; 22] = [
    "BOOL",
    "F4",
    "F6_E2M3",
    "F6_E3M2",
    "U8",
    "I8",
    "F8_E5M2",
    "F8_E4M3",
    "F8_E8M0",
    "F8_E4M3FNUZ",
    "F8_E5M2FNUZ",
    "I16",
    "U16",
    "F16",
    "BF16",
    "I32",
    "U32",
    "F32",
    "C64",
    "F64",
    "I64",
    "U64",
];

#[test]
fn all_types_and_ranks_are_read() {
    for name in TYPES {
        let bits = dtype_from_name(name).unwrap().bitsize() as u64;
        for rank in 0..=8 {
            // Four elements or none, so that types below a byte fill bytes; a scalar of them cannot.
            let shape: Vec<u64> = (0..rank).map(|d| if d == 0 { 4 } else { 1 }).collect();
            let elements: u64 = shape.iter().product();
            if !(elements * bits).is_multiple_of(8) {
                continue;
            }
            let bytes = elements * bits / 8;
            let header = read(&model(&[("t", name, &shape, bytes)], &[])).unwrap();
            let tensor = &header.tensors[0];
            assert_eq!(
                (tensor.kind.to_string().as_str(), &tensor.shape, tensor.bytes()),
                (name, &shape, bytes)
            );
            assert_eq!(tensor.range.start, header.data_start);
        }
    }
}

#[test]
fn the_order_of_the_header_does_not_matter_and_the_order_of_the_bytes_does() {
    let entries =
        [entry("c", "U8", &[2], 8, 10), entry("a", "F32", &[1], 4, 8), entry("b", "I16", &[2], 0, 4)]
            .join(",");
    let header = read(&file(format!("{{{entries}}}"), &[0; 10])).unwrap();
    let found: Vec<_> =
        header.tensors.iter().map(|t| (t.name.as_str(), t.range.start - header.data_start)).collect();
    assert_eq!(found, [("b", 0), ("a", 4), ("c", 8)]);
}

#[test]
fn fields_come_in_any_order_and_unknown_ones_are_passed_over() {
    let text = r#" {"t" : {"note":{"a":[1.5,null]},"data_offsets":[0,4],"x":"\u0041", "shape":[ 2 ,2 ],"dtype":"U8"} } "#;
    let header = read(&file(text, &[0; 4])).unwrap();
    assert_eq!(
        (header.tensors[0].kind, &header.tensors[0].shape[..]),
        (TensorType::Plain(dtype_from_name("U8").unwrap()), &[2, 2][..])
    );
}

#[test]
fn metadata_is_text_by_key() {
    let header = read(&file(r#"{"__metadata__":{"format":"pt","a\u0062":"é"}}"#, &[])).unwrap();
    let wanted = [("format", "pt"), ("ab", "é")].map(|(k, v)| (k.to_owned(), v.to_owned()));
    assert_eq!(header.metadata, BTreeMap::from(wanted));
    assert!(read(&file(r#"{"__metadata__":null}"#, &[])).unwrap().metadata.is_empty());
    assert!(read(&file("{}", &[])).unwrap().tensors.is_empty());
}

#[test]
fn a_header_may_be_padded_with_white_space() {
    let text = format!("{{{}}}   \n\t ", entry("t", "U8", &[1], 0, 1));
    assert_eq!(read(&file(text, &[7])).unwrap().tensors.len(), 1);
}

#[test]
fn names_are_data() {
    for name in ["", "a\\u0000b", "../../x", "/etc/passwd", "C:\\\\x", "a b\\n", "\\ud83d\\ude00", "__meta__"]
    {
        let header = read(&file(format!("{{{}}}", entry(name, "U8", &[1], 0, 1)), &[0])).unwrap();
        let decoded: String = serde_json::from_str(&format!("\"{name}\"")).unwrap();
        assert_eq!(header.tensors[0].name, decoded);
    }
}

#[test]
fn empty_tensors_lie_between_others_in_either_order_of_keys() {
    let (a, b, z) =
        (entry("a", "U8", &[4], 0, 4), entry("b", "U8", &[4], 4, 8), entry("z", "F32", &[0, 3], 4, 4));
    for order in [[&a, &z, &b], [&z, &b, &a], [&b, &a, &z]] {
        let text = order.map(String::as_str).join(",");
        let header = read(&file(format!("{{{text}}}"), &[0; 8])).unwrap();
        let names: Vec<_> = header.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a", "z", "b"]);
    }
    // First and last, too.
    let ends = [entry("y", "F32", &[0], 0, 0), a, b, entry("z", "I64", &[7, 0], 8, 8)].join(",");
    assert_eq!(read(&file(format!("{{{ends}}}"), &[0; 8])).unwrap().tensors.len(), 4);
}

#[test]
fn misaligned_tensors_are_found_and_said_to_be() {
    let tensors: [(&str, &str, &[u64], u64); 6] = [
        ("a", "U8", &[3], 3),
        ("b", "F32", &[5], 20),
        ("c", "BF16", &[7], 14),
        ("d", "F8_E4M3", &[1], 1),
        ("e", "I64", &[2], 16),
        ("f", "F16", &[0], 0),
    ];
    let bytes = model(&tensors, &[]);
    let header = read(&bytes).unwrap();
    for (tensor, (name, _, _, size)) in header.tensors.iter().zip(tensors) {
        assert_eq!((tensor.name.as_str(), tensor.bytes()), (name, size));
        assert_eq!(tensor.is_aligned(), tensor.range.start % tensor.kind.alignment() == 0);
    }
    assert!(header.tensors.iter().any(|t| !t.is_aligned()));
    assert!(header.tensors.iter().filter(|t| t.kind.alignment() == 1).all(TensorInfo::is_aligned));
}

#[test]
fn trailing_bytes_are_counted_when_they_are_allowed() {
    let mut bytes = model(&[("t", "U8", &[4], 4)], &[]);
    bytes.extend([9; 4096]);
    let lax = |bytes: &[u8]| read_header(bytes, bytes.len() as u64, Path::new("m"), &Limits::default(), true);
    assert_eq!(lax(&bytes).unwrap().trailing, 4096);
    // Nothing else is allowed by it.
    bytes.truncate(bytes.len() - 4097);
    assert!(matches!(lax(&bytes), Err(CheckpointError::Header { .. })));
}

#[test]
fn a_file_that_shrinks_while_it_is_read_is_an_error_of_reading() {
    let bytes = model(&[("t", "U8", &[4], 4)], &[]);
    for cut in [0, 5, 8, 30] {
        let outcome =
            read_header(&bytes[..cut], bytes.len() as u64, Path::new("m"), &Limits::default(), false);
        assert!(matches!(outcome, Err(CheckpointError::Io { .. })), "{cut}: {outcome:?}");
    }
}

#[test]
fn nothing_after_the_header_is_read() {
    let bytes = model(&[("t", "U8", &[4], 4)], &[]);
    let header = &bytes[..bytes.len() - 4];
    assert!(read_header(header, bytes.len() as u64, Path::new("m"), &Limits::default(), false).is_ok());
}

#[test]
fn limits_are_the_callers() {
    let bytes = model(&[("abc", "U8", &[1, 1], 1), ("d", "U8", &[1], 1)], &[("k", "value")]);
    assert!(read(&bytes).is_ok());
    let with = |change: fn(&mut Limits)| {
        let mut limits = Limits::default();
        change(&mut limits);
        read_within(&bytes, &limits).unwrap_err().to_string()
    };
    let found = [
        with(|l| l.max_header = 20),
        with(|l| (l.free_header, l.max_header_ratio) = (1, 2)),
        with(|l| l.max_tensors = 1),
        with(|l| l.max_rank = 1),
        with(|l| l.max_name = 2),
        with(|l| l.max_metadata = 5),
        with(|l| l.max_metadata_entries = 0),
        with(|l| l.max_memory = 200),
    ];
    let mut different = found.to_vec();
    different.sort();
    different.dedup();
    assert_eq!(different.len(), found.len(), "{found:#?}");
}
