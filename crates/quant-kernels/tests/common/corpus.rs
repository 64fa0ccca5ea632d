//! The files that quant-router's decoders are compared with their references on, carried inside the test program.

use std::collections::BTreeMap;

use checkpoint::gguf::GgmlType;
use checkpoint::{Checkpoint, OpenOptions, TensorInfo, TensorType};
use quant_router::QuantWeight;
use quant_router::detect::{Handlers, Header};

use super::Case;

macro_rules! files {
    ($folder:literal, $end:literal: $($name:literal)*) => {
        &[$(($name, include_bytes!(concat!(
            "../../../quant-router/tests/corpus/", $folder, "/", $name, $end
        )) as &[u8]),)*]
    };
}

const GGML: &[(&str, &[u8])] = files!("ggml", ".blocks":
    "Q4_0" "Q4_1" "Q5_0" "Q5_1" "Q8_0" "Q8_1" "Q1_0" "Q2_0" "Q2_K" "Q3_K" "Q4_K" "Q5_K" "Q6_K" "Q8_K"
    "IQ4_NL" "IQ4_XS" "MXFP4" "NVFP4" "TQ1_0" "TQ2_0" "IQ1_S" "IQ1_M" "IQ2_XXS" "IQ2_XS" "IQ2_S" "IQ3_XXS" "IQ3_S");
const FORMATS: &[(&str, &[u8])] = files!("formats", ".safetensors":
    "fp8" "fp8-plain" "int8" "nvfp4" "nvfp4-modelopt" "nvfp4-compressed-tensors" "mxfp8" "bnb" "quanto" "torchao" "w4a8" "nunchaku" "rotation" "experts"
    "gptq" "gptq-v2" "gptq-3bit" "awq" "compressed-tensors-int");

/// The type of this name.
pub(crate) fn kind(name: &str) -> GgmlType {
    GgmlType::all().find(|kind| kind.name() == name).unwrap()
}

/// A weight of blocks.
pub(crate) fn blocks(name: &str, kind: GgmlType, shape: &[u64], bytes: Vec<u8>) -> Case {
    let tensor = TensorInfo {
        name: "layer.weight".into(),
        kind: TensorType::Ggml(kind),
        shape: shape.to_vec(),
        file: 0,
        range: 0..bytes.len() as u64,
    };
    let weight = QuantWeight::ggml(&tensor).unwrap();
    Case { name: name.into(), weight, parts: BTreeMap::from([(tensor.name, bytes)]) }
}

/// Random and extreme blocks of every type, a row each.
pub(crate) fn ggml() -> Vec<Case> {
    let quantized = GgmlType::all().filter(|kind| kind.is_quantized()).count();
    assert_eq!(GGML.len(), quantized, "a type has no blocks here");
    let case = |(name, bytes): &(&str, &[u8])| {
        let kind = kind(name);
        let rows = bytes.len() as u64 / kind.block_bytes();
        blocks(&format!("corpus {name}"), kind, &[rows, kind.block_elements()], bytes.to_vec())
    };
    GGML.iter().map(case).collect()
}

/// Every weight of every file.
pub(crate) fn formats() -> Vec<Case> {
    let mut cases = Vec::new();
    let folder = std::env::temp_dir().join(format!("quant-kernels-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for (name, content) in FORMATS {
        // Each call has a file of its own: tests run beside each other.
        let path = folder.join(format!("{name}-{:?}.safetensors", std::thread::current().id()));
        std::fs::write(&path, content).unwrap();
        let model = Checkpoint::open(&path, &OpenOptions::default()).unwrap();
        let read = |tensor: &TensorInfo| {
            let mut bytes = vec![0; tensor.bytes() as usize];
            model.files()[tensor.file].read_exact_at(tensor.range.start, &mut bytes).unwrap();
            Ok(bytes)
        };
        let given = model.tensors().iter().filter(|tensor| !tensor.name.starts_with("expected."));
        let detection = Handlers::default().detect(&Header::new(given, model.metadata(), &read)).unwrap();
        let bytes = |tensor: &String| read(model.get(tensor).unwrap()).unwrap();
        for (layer, found) in detection.weights {
            let tensors = found.weight.parts.iter().map(|part| &part.tensor);
            let parts = tensors.map(|tensor| (tensor.clone(), bytes(tensor))).collect();
            cases.push(Case { name: format!("{name} {layer}"), weight: found.weight, parts });
        }
        let _ = std::fs::remove_file(path);
    }
    let _ = std::fs::remove_dir(folder);
    assert!(cases.len() > 140, "{}", cases.len());
    cases
}
