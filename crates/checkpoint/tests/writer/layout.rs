//! Where everything is in a written file, and that others read it.

use std::collections::HashMap;
use std::fs;

use checkpoint::safetensors::dtype_from_name;
use checkpoint::{Checkpoint, ModelMetadata, OpenOptions, Order, TensorOut, TensorType, WriteOptions, write};
use proptest::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

use crate::plain;

const TYPES: &str = "BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 I32 \
                     U32 F32 C64 F64 I64 U64";

/// A tensor with bytes that count up from its number.
#[derive(Debug, Clone)]
struct Made {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Vec<u8>,
}

impl Made {
    fn new(name: String, dtype: Dtype, shape: Vec<u64>) -> Self {
        let bits = shape.iter().product::<u64>() * dtype.bitsize() as u64;
        let first = name.bytes().fold(0_u8, u8::wrapping_add);
        let bytes = (0..bits / 8).map(|byte| first.wrapping_add(byte as u8)).collect();
        Self { name, dtype, shape, bytes }
    }

    fn out(&self) -> TensorOut<'_> {
        TensorOut { name: &self.name, dtype: self.dtype, shape: &self.shape, bytes: &self.bytes }
    }

    fn view(&self) -> TensorView<'_> {
        let shape = self.shape.iter().map(|dim| *dim as usize).collect();
        TensorView::new(self.dtype, shape, &self.bytes).unwrap()
    }
}

fn written(tensors: &[Made], options: &WriteOptions) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let out: Vec<_> = tensors.iter().map(Made::out).collect();
    write(&path, &out, options).unwrap();
    let bytes = fs::read(&path).unwrap();
    // Our own reader, beside the official one.
    let opened = Checkpoint::open(&path, &OpenOptions::default()).unwrap();
    let official = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!((opened.tensors().len(), official.len()), (tensors.len(), tensors.len()));
    for made in tensors {
        let found = opened.get(&made.name).unwrap();
        assert_eq!((found.kind, &found.shape), (TensorType::Plain(made.dtype), &made.shape));
        assert_eq!(bytes[found.range.start as usize..found.range.end as usize], made.bytes);
        let found = official.tensor(&made.name).unwrap();
        assert_eq!((found.dtype(), found.data()), (made.dtype, &made.bytes[..]));
    }
    bytes
}

fn tensors() -> impl Strategy<Value = Vec<Made>> {
    let types: Vec<_> = TYPES.split_whitespace().map(|name| dtype_from_name(name).unwrap()).collect();
    let tensor =
        (".{0,8}", proptest::sample::select(types), proptest::collection::vec(0_u64..5, 0..3), 0_u32..13);
    let tensor = tensor.prop_map(|(name, dtype, mut shape, shift)| {
        // Eight elements of any type are whole bytes.
        shape.push(8 << shift.saturating_sub(4));
        Made::new(name, dtype, shape)
    });
    proptest::collection::vec(tensor, 0..9).prop_map(|list| {
        let named: HashMap<_, _> = list.into_iter().map(|made| (made.name.clone(), made)).collect();
        named.into_values().collect()
    })
}

proptest! {
    #[test]
    fn byte_for_byte_what_the_official_library_writes(tensors in tensors()) {
        let ours = written(&tensors, &plain(&[("format", "pt")]));
        let metadata = [("format".to_owned(), "pt".to_owned())].into_iter().collect();
        let views = tensors.iter().map(|made| (made.name.as_str(), made.view()));
        let theirs = safetensors::serialize(views, Some(metadata)).unwrap();
        prop_assert_eq!(ours, theirs);
    }

    #[test]
    fn every_start_is_as_aligned_as_promised(tensors in tensors(), shift in 0_u32..14) {
        let alignment = 1_u64 << shift;
        let options = WriteOptions { alignment, order: Order::Aligned, ..WriteOptions::default() };
        let bytes = written(&tensors, &options);
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) + 8;
        prop_assert!(header.is_multiple_of(alignment.max(8)));
        let official = SafeTensors::deserialize(&bytes).unwrap();
        for (name, found) in official.iter() {
            let start = found.data().as_ptr() as u64 - bytes.as_ptr() as u64;
            let size = found.data().len() as u64;
            if size > 0 {
                let promised = (1 << size.trailing_zeros()).min(alignment);
                prop_assert!(start.is_multiple_of(promised), "{name:?} of {size} at {start}");
                prop_assert!(start.is_multiple_of((found.dtype().bitsize() as u64 / 8).clamp(1, alignment.max(8))));
            }
        }
    }
}

#[test]
fn all_types_are_written_and_read() {
    let types = TYPES.split_whitespace().map(|name| (name, dtype_from_name(name).unwrap()));
    let mut tensors: Vec<_> =
        types.map(|(name, dtype)| Made::new(name.to_owned(), dtype, vec![3, 8])).collect();
    tensors.push(Made::new("scalar".into(), Dtype::F32, vec![]));
    tensors.push(Made::new("empty".into(), Dtype::BF16, vec![0, 7]));
    tensors.push(Made::new("../../\"quoted\"\n\u{0}".into(), Dtype::U8, vec![1; 8]));
    let bytes = written(&tensors, &WriteOptions::default());
    assert_eq!(u64::from_le_bytes(bytes[..8].try_into().unwrap()), 4096 - 8);
    assert!(bytes[4095] == b' ' && bytes[..4096].trim_ascii_end().ends_with(b"}"), "filled up with spaces");
}

#[test]
fn a_file_without_tensors_is_a_file() {
    let bytes = written(&[], &plain(&[]));
    assert_eq!(&bytes[8..], br#"{"__metadata__":{"format":"pt"}}"#);
}

#[test]
fn model_metadata_comes_back_from_the_file() {
    let mut metadata = ModelMetadata::default();
    metadata.set_config(r#"{"_class_name": "Net", "layers": 2}"#).unwrap();
    metadata.set_quantization("quanto", r#"{"a": {"weights": "qint8", "activations": "none"}}"#).unwrap();
    metadata.set_tied_weights(&[("a".to_owned(), vec!["b".to_owned()])].into());
    metadata.text.insert("title".into(), "A \"title\"".into());
    let options = WriteOptions { metadata: metadata.encode(), ..WriteOptions::default() };
    let bytes = written(&[Made::new("a".into(), Dtype::F32, vec![2])], &options);
    let (_, official) = SafeTensors::read_metadata(&bytes).unwrap();
    let stored = official.metadata().clone().unwrap();
    let keys = [
        "config_base64",
        "format",
        "quantization_format",
        "quantization_map_base64",
        "tied_weights_map_base64",
    ];
    assert!(keys.iter().all(|key| stored.contains_key(*key)) && stored.len() == keys.len() + 1, "{stored:?}");
    let mut again = ModelMetadata::decode(&stored.into_iter().collect());
    assert_eq!(again.text.remove("format").as_deref(), Some("pt"));
    assert_eq!(again, metadata);
}

/// What another program wrote with Python's `base64.b64encode(json.dumps(…).encode("utf8"))` under the same keys.
#[test]
fn metadata_as_python_encodes_it_is_read() {
    let stored = [
        ("config_base64", "eyJfY2xhc3NfbmFtZSI6ICJOZXQiLCAibmFtZSI6ICJuYcOvdmUifQ=="),
        ("quantization_format", "quanto"),
        ("quantization_map_base64", "eyJhIjogeyJ3ZWlnaHRzIjogInFpbnQ4IiwgImFjdGl2YXRpb25zIjogIm5vbmUifX0="),
        ("tied_weights_map_base64", "eyJhLndlaWdodCI6IFsiYi53ZWlnaHQiXX0="),
    ];
    let stored = stored.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    let metadata = ModelMetadata::decode(&stored);
    assert_eq!(metadata.config().unwrap(), Some("{\"_class_name\": \"Net\", \"name\": \"naïve\"}"));
    assert_eq!(
        metadata.quantization_map().unwrap(),
        Some(r#"{"a": {"weights": "qint8", "activations": "none"}}"#)
    );
    assert_eq!(metadata.tied_weights().unwrap()["a.weight"], ["b.weight"]);
    assert_eq!(metadata.encode(), stored);
}
