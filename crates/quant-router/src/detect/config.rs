//! What a model's configuration says of how it is quantized, where tensors alone do not.

use std::collections::BTreeMap;

use checkpoint::ModelMetadata;
use serde_json::Value;

use super::header::Header;
use crate::error::{QuantError, Result};

/// The key of this in a configuration, and in metadata.
const KEY: &str = "quantization_config";

/// The texts and numbers of `quantization_config`, in lower case, by key: `quant_method`, `checkpoint_format`, `bits`, `group_size`.
#[derive(Debug, Default)]
pub(super) struct QuantConfig {
    entries: BTreeMap<String, String>,
    /// The configuration that may hold it, and why it cannot be read.
    unreadable: Option<(String, String)>,
}

impl QuantConfig {
    /// Reads it, from metadata of its own or from the model's configuration in them. An error if it is there and cannot be read; a
    /// configuration that cannot be read is none for weights that nothing is asked about.
    pub(super) fn of_header(header: &Header<'_>) -> Result<Self> {
        let refuse = |why: String| QuantError::Marker { layer: "*".into(), tensor: KEY.into(), why };
        let decoded = ModelMetadata::decode(header.metadata());
        let own = decoded.json(KEY).or_else(|| decoded.text.get(KEY).map(String::as_str));
        let found = if let Some(text) = own {
            Some(serde_json::from_str(text).map_err(|error| refuse(error.to_string()))?)
        } else {
            let broken = decoded.broken().find(|(key, _)| key.starts_with("config"));
            let unreadable = broken.map(|(key, why)| (key.to_owned(), why.to_owned()));
            let Ok(config) = decoded.config() else { return Ok(Self { unreadable, ..Self::default() }) };
            let config = config.or_else(|| decoded.text.get("config").map(String::as_str));
            // Text under this name that is no JSON is somebody's remark.
            let config: Option<Value> = config.and_then(|text| serde_json::from_str(text).ok());
            config.and_then(|config| config.get(KEY).cloned())
        };
        match found {
            None | Some(Value::Null) => Ok(Self::default()),
            Some(Value::Object(entries)) => {
                let text = |value: Value| match value {
                    Value::String(text) => Some(text.to_lowercase()),
                    Value::Number(number) => Some(number.to_string()),
                    // Each layer has settings of its own, which are not looked into.
                    Value::Object(_) => Some(String::new()),
                    _ => None,
                };
                let entries = entries.into_iter().filter_map(|(key, value)| Some((key, text(value)?)));
                Ok(Self { entries: entries.collect(), unreadable: None })
            }
            Some(_) => Err(refuse("it is no JSON object".into())),
        }
    }

    /// The same for a layer whose numbers depend on it. An error if the configuration may hold it and cannot be read.
    pub(super) fn for_layer(&self, layer: &str) -> Result<&Self> {
        match &self.unreadable {
            None => Ok(self),
            Some((key, why)) => {
                Err(QuantError::Marker { layer: layer.into(), tensor: key.clone(), why: why.clone() })
            }
        }
    }

    /// A text of it.
    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.entries.get(key).map(String::as_str)
    }
}
