//! Headers by hand.

use std::collections::BTreeMap;

use checkpoint::safetensors::dtype_from_name;
use checkpoint::{TensorInfo, TensorType};
use quant_router::detect::{Detection, Handlers, Header};
use quant_router::{QuantError, Result};

/// A file that has no bytes but those of markers and of scales that are compared.
#[derive(Debug, Default, Clone)]
pub(crate) struct File {
    tensors: Vec<TensorInfo>,
    metadata: BTreeMap<String, String>,
    bytes: BTreeMap<String, Vec<u8>>,
}

impl File {
    /// A tensor that nobody may read.
    pub(crate) fn tensor(mut self, name: &str, dtype: &str, shape: &[u64]) -> Self {
        let dtype = dtype_from_name(dtype).unwrap();
        let bytes = shape.iter().product::<u64>() * dtype.bitsize() as u64 / 8;
        let kind = TensorType::Plain(dtype);
        self.tensors.push(TensorInfo {
            name: name.into(),
            kind,
            shape: shape.into(),
            file: 0,
            range: 0..bytes,
        });
        self
    }

    /// A tensor of bytes that may be read.
    pub(crate) fn marker(self, name: &str, bytes: &[u8]) -> Self {
        let mut file = self.tensor(name, "U8", &[bytes.len() as u64]);
        file.bytes.insert(name.into(), bytes.into());
        file
    }

    /// A scale that may be read.
    pub(crate) fn scale(self, name: &str, shape: &[u64], number: f32) -> Self {
        let mut file = self.tensor(name, "F32", shape);
        file.bytes.insert(name.into(), number.to_le_bytes().into());
        file
    }

    /// A shape that may be read.
    pub(crate) fn numbers(self, name: &str, numbers: &[i64]) -> Self {
        let mut file = self.tensor(name, "I64", &[numbers.len() as u64]);
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
        file.bytes.insert(name.into(), bytes.collect());
        file
    }

    pub(crate) fn says(mut self, key: &str, text: &str) -> Self {
        self.metadata.insert(key.into(), text.into());
        self
    }

    pub(crate) fn detect(&self) -> Result<Detection> {
        self.detect_with(&Handlers::default())
    }

    pub(crate) fn detect_with(&self, handlers: &Handlers) -> Result<Detection> {
        let read = |tensor: &TensorInfo| {
            Ok(self.bytes.get(&tensor.name).unwrap_or_else(|| panic!("{} was read", tensor.name)).clone())
        };
        let detection = handlers.detect(&Header::new(&self.tensors, &self.metadata, &read))?;
        // Every tensor is in exactly one place.
        let mut places: Vec<&str> =
            detection.plain.iter().chain(&detection.hints).map(String::as_str).collect();
        for found in detection.weights.values() {
            places.extend(found.weight.parts.iter().map(|part| part.tensor.as_str()));
        }
        places.sort_unstable();
        let mut names: Vec<&str> = self.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(places, names);
        Ok(detection)
    }

    /// Which handler would describe each weight. Reads nothing.
    pub(crate) fn claims(&self, handlers: &Handlers) -> BTreeMap<String, (String, u32)> {
        let read = |tensor: &TensorInfo| panic!("{} was read", tensor.name);
        handlers.claims(&Header::new(&self.tensors, &self.metadata, &read)).unwrap()
    }

    /// The error, which must name this layer.
    pub(crate) fn refused(&self, layer: &str) -> QuantError {
        let error = self.detect().unwrap_err();
        assert!(error.to_string().contains(&format!("{layer:?}")), "{error}");
        error
    }
}

/// The format of a weight in words.
pub(crate) fn format(detection: &Detection, weight: &str) -> String {
    detection.weights[weight].weight.format.to_string()
}
