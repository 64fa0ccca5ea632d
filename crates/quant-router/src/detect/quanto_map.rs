//! The map of quantized modules that optimum-quanto and mmgp put into a file's metadata.

use std::collections::BTreeMap;

use checkpoint::ModelMetadata;
use serde_json::Value;

use super::header::{Header, module};
use crate::error::{QuantError, Result};

/// The metadata key, whose value is JSON; under `quantization_map_base64` it is Base64 of JSON.
const KEY: &str = "quantization_map";

/// The type of each quantized module's weight, by module or by weight.
#[derive(Debug, Default)]
pub(super) struct QuantoMap(BTreeMap<String, String>);

impl QuantoMap {
    /// Reads the map. An error if it is there and cannot be read.
    pub(super) fn of_header(header: &Header<'_>) -> Result<Self> {
        let refuse = |why: String| QuantError::Marker { layer: "*".into(), tensor: KEY.into(), why };
        let decoded = ModelMetadata::decode(header.metadata());
        let stored = decoded.quantization_map().map_err(|error| refuse(error.to_string()))?;
        let plain = || decoded.text.get(KEY).map(String::as_str);
        let Some(text) = stored.or_else(plain) else { return Ok(Self::default()) };
        let Value::Object(modules) = serde_json::from_str(text).map_err(|error| refuse(error.to_string()))?
        else {
            return Err(refuse("it is no JSON object".into()));
        };
        let mut types = BTreeMap::new();
        for (name, entry) in modules {
            match entry.get("weights") {
                None | Some(Value::Null) => {}
                Some(Value::String(kind)) if kind == "none" => {}
                Some(Value::String(kind)) => {
                    types.insert(name, kind.clone());
                }
                Some(other) => return Err(refuse(format!("the weights of {name:?} are {other}, no text"))),
            }
        }
        Ok(Self(types))
    }

    /// The type of a weight.
    pub(super) fn of(&self, weight: &str) -> Option<&str> {
        let by_module = || self.0.get(module(weight)).filter(|_| weight.rsplit('.').next() == Some("weight"));
        self.0.get(weight).or_else(by_module).map(String::as_str)
    }
}
