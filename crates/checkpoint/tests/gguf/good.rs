//! Files that are right: true shapes, split models, lists that are not kept, text that is not UTF-8.

use std::fs;
use std::path::Path;

use checkpoint::gguf::{GgmlType, ShapeFit, Value, ValueType, check_splits, fit_shape};
use checkpoint::{Checkpoint, Limits, OpenOptions, TensorType};

use crate::build::{Bytes, read};
use crate::reference::corpus;

#[test]
fn true_shapes_replace_stored_ones_of_as_many_elements() {
    let bytes = fs::read(corpus().join("shapes.gguf")).unwrap();
    let (header, gguf) = read(&bytes).unwrap();
    let find = |name: &str| header.tensors.iter().find(|tensor| tensor.name == name).unwrap();
    assert_eq!(find("first.weight").shape, [48, 8]);
    assert_eq!(gguf.stored_shape("first.weight"), Some(&[2, 192][..]));
    assert_eq!(find("img_in.weight").shape, [3, 2, 64]);
    assert_eq!(find("same.weight").shape, [6, 64]);
    assert_eq!(gguf.stored_shape("same.weight"), None);
    let notes = gguf.notes();
    assert!(notes.len() == 1 && notes[0].contains("comfy.gguf.orig_shape.nobody"), "{notes:?}");

    let lin = find("lin.weight");
    assert_eq!((lin.kind, &lin.shape[..]), (TensorType::Ggml(GgmlType::Q8_0), &[64, 64][..]));
    let rows = (lin.bytes() / 64, GgmlType::Q8_0.row_elements(lin.bytes() / 64));
    assert_eq!(rows, (68, Some(64)), "68 bytes a row, and 64 columns");
    // Each block of 32: a half-precision scale, then 32 integers. The rows were sin(0), sin(1), …
    let block = &bytes[lin.range.start as usize..][..34];
    let scale = half(u16::from_le_bytes([block[0], block[1]]));
    for (index, quant) in block[2..].iter().enumerate() {
        let value = scale * f32::from(quant.cast_signed());
        assert!((value - (index as f32).sin()).abs() <= scale / 2.0 + 1e-6, "element {index}: {value}");
    }

    let pad = find("x_pad_token");
    assert_eq!((pad.kind.to_string().as_str(), &pad.shape[..]), ("BF16", &[3840][..]));
    assert_eq!(fit_shape(&pad.shape, &[1, 3840]), ShapeFit::LeadingOnes(1));
}

/// A half-precision number that is neither tiny nor infinite.
fn half(bits: u16) -> f32 {
    let (sign, exponent, fraction) = (bits >> 15, bits >> 10 & 0x1F, bits & 0x3FF);
    assert!((1..31).contains(&exponent));
    f32::from_bits(u32::from(sign) << 31 | (u32::from(exponent) + 112) << 23 | u32::from(fraction) << 13)
}

#[test]
fn plain_numbers_have_the_names_of_safetensors() {
    let bytes = fs::read(corpus().join("types.gguf")).unwrap();
    let (header, _) = read(&bytes).unwrap();
    assert_eq!(header.tensors.len(), GgmlType::all().count() - 2, "all but Q8_1 and Q2_0");
    for tensor in &header.tensors {
        let kind = GgmlType::all().find(|kind| tensor.name == format!("of.{kind}")).unwrap();
        assert_eq!(tensor.kind, kind.plain().map_or(TensorType::Ggml(kind), TensorType::Plain));
        assert_eq!(tensor.shape, [2, 2 * kind.block_elements()]);
        assert_eq!(tensor.bytes(), 4 * kind.block_bytes());
    }
}

#[test]
fn a_split_model_is_one_model_and_its_parts_are_none() {
    let part = |number: u32| corpus().join(format!("split-0000{number}-of-00003.gguf"));
    let whole = Checkpoint::open(part(2), &OpenOptions::default()).unwrap();
    let names: Vec<_> = whole.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["blk.0.w", "blk.1.w", "blk.2.w", "blk.3.w", "blk.4.w"]);
    assert_eq!(whole.notes(), [""; 0]);

    let headers: Vec<_> = (1..=3).map(|number| read(&fs::read(part(number)).unwrap()).unwrap()).collect();
    let path = Path::new("m.gguf");
    let parts = |numbers: &[usize]| -> Vec<_> {
        numbers.iter().map(|n| (path, &headers[*n].1, headers[*n].0.tensors.len())).collect()
    };
    check_splits(&parts(&[2, 0, 1])).unwrap();
    check_splits(&[]).unwrap();
    let refused = |numbers: &[usize]| check_splits(&parts(numbers)).unwrap_err().to_string();
    assert!(refused(&[0, 2]).contains("part 1 is missing"), "{}", refused(&[0, 2]));
    assert!(refused(&[1]).contains("has 3 parts, 1 were given"), "{}", refused(&[1]));
    assert!(refused(&[0, 1, 1]).contains("is part 1 of its model, and so is"), "{}", refused(&[0, 1, 1]));
    let mut wrong = parts(&[0, 1, 2]);
    wrong[1].2 += 1;
    let error = check_splits(&wrong).unwrap_err().to_string();
    assert!(error.contains("5 tensors together, and they have 6"), "{error}");
    let (_, single) = read(&fs::read(corpus().join("aligned.gguf")).unwrap()).unwrap();
    let mut mixed = parts(&[0, 1, 2]);
    mixed.push((path, &single, 5));
    assert!(check_splits(&mixed).unwrap_err().to_string().contains("is no part of a split model"));
    check_splits(&[(path, &single, 5), (path, &single, 5)]).unwrap();
}

#[test]
fn long_lists_are_left_where_they_are() {
    let bytes = fs::read(corpus().join("values.gguf")).unwrap();
    let (header, gguf) = read(&bytes).unwrap();
    let long = gguf.get("long.INT32").unwrap().as_array().unwrap();
    assert_eq!((long.element, long.count, long.values()), (ValueType::I32, 5000, None));
    assert_eq!(long.range.end - long.range.start, 20_000);
    assert!(!header.metadata.contains_key("long.INT32"));
    assert_eq!(header.metadata["list.INT16"], "[-30000,-30000,-30000]");
    assert_eq!(header.metadata["list.STRING"], r#"["a","ü",""]"#);
    assert_eq!(header.metadata["one.FLOAT32"], "0.15625");
    assert_eq!(header.metadata["config"], r#"{"hidden_size": 64, "name": "test"}"#);

    let source = checkpoint::gguf::MemorySource::new(Path::new("m.gguf"), &bytes);
    let mut limits = Limits::default();
    limits.max_metadata = 10_000;
    let error = gguf.elements(&source, "long.INT32", &limits).unwrap_err().to_string();
    assert!(error.contains("more than the 10000 allowed"), "{error}");
    assert_eq!(gguf.elements(&source, "text", &limits).unwrap(), None);
    assert_eq!(gguf.elements(&source, "nothing", &limits).unwrap(), None);
}

#[test]
fn lists_in_lists_and_text_of_other_codes_are_kept_apart() {
    let list = Bytes::file(0, 2).text("nested").u32(9).u32(9).u64(2);
    let list = list.u32(4).u64(2).u32(1).u32(2).u32(8).u64(1).text("x");
    let file = list.text("latin").u32(8).u64(4).raw(b"caf\xE9").0;
    let (header, gguf) = read(&file).unwrap();
    assert_eq!(gguf.get("latin"), Some(&Value::Bytes(b"caf\xE9".to_vec())));
    assert_eq!(header.metadata["latin"], "caf\u{FFFD}");
    let source = checkpoint::gguf::MemorySource::new(Path::new("m.gguf"), &file);
    let nested = gguf.elements(&source, "nested", &Limits::default()).unwrap().unwrap();
    let inner: Vec<_> =
        nested.iter().map(|list| list.as_array().unwrap().values().unwrap().to_vec()).collect();
    assert_eq!(inner, [vec![Value::U32(1), Value::U32(2)], vec![Value::Text("x".into())]]);
}

#[test]
fn scalars_empty_tensors_and_gaps_are_allowed() {
    let table = Bytes::file(3, 0).tensor("late", &[2], 0, 64).tensor("none", &[0, 7], 0, 64);
    let file = table.tensor("scalar", &[], 0, 0).pad(32).zeros(72).0;
    let (header, _) = read(&file).unwrap();
    let found: Vec<_> = header.tensors.iter().map(|t| (t.name.as_str(), t.bytes(), t.shape.len())).collect();
    assert_eq!(found, [("scalar", 4, 0), ("none", 0, 2), ("late", 8, 1)]);
    assert_eq!(header.tensors[0].range.start, header.data_start);
}
