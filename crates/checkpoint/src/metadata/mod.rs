//! What a model file says of its model in its metadata: configuration, quantization map, tied weights. A header holds text
//! only, so that JSON is stored as Base64 under a key that ends with `_base64`.

mod base64;

use std::collections::BTreeMap;

use serde::de::IgnoredAny;

use crate::{CheckpointError, Result};

/// What keys of JSON end with.
const SUFFIX: &str = "_base64";
const CONFIG: &str = "config";
const QUANTIZATION_MAP: &str = "quantization_map";
const QUANTIZATION_FORMAT: &str = "quantization_format";
const TIED_WEIGHTS: &str = "tied_weights_map";
/// Keys of JSON that nothing else can be stored under.
const KNOWN: [&str; 3] = [CONFIG, QUANTIZATION_MAP, TIED_WEIGHTS];

/// The metadata of a model file, decoded.
///
/// ```
/// use checkpoint::ModelMetadata;
///
/// let mut metadata = ModelMetadata::default();
/// metadata.set_config(r#"{"hidden_size": 64}"#)?;
/// let stored = metadata.encode();
/// assert_eq!(stored["config_base64"], "eyJoaWRkZW5fc2l6ZSI6IDY0fQ==");
/// assert_eq!(ModelMetadata::decode(&stored)?.config(), Some(r#"{"hidden_size": 64}"#));
/// # Ok::<(), checkpoint::CheckpointError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelMetadata {
    /// Text, by key.
    pub text: BTreeMap<String, String>,
    json: BTreeMap<String, String>,
}

impl ModelMetadata {
    /// Takes the metadata of a file apart. A key that ends with `_base64` loses that ending if JSON is behind it; for a
    /// configuration, quantization map or tied map that is no JSON the file is refused, other keys stay text.
    pub fn decode(stored: &BTreeMap<String, String>) -> Result<Self> {
        let mut metadata = Self::default();
        for (key, value) in stored {
            let Some(name) = key.strip_suffix(SUFFIX) else {
                metadata.text.insert(key.clone(), value.clone());
                continue;
            };
            match json_behind(value) {
                Ok(json) => metadata.json.insert(name.to_owned(), json),
                Err(why) if KNOWN.contains(&name) => return bad(key, why),
                Err(_) => metadata.text.insert(key.clone(), value.clone()),
            };
        }
        metadata.tied_weights()?;
        Ok(metadata)
    }

    /// The metadata as a file stores it.
    pub fn encode(&self) -> BTreeMap<String, String> {
        let json =
            self.json.iter().map(|(name, json)| (format!("{name}{SUFFIX}"), base64::encode(json.as_bytes())));
        self.text.clone().into_iter().chain(json).collect()
    }

    /// JSON under any name, as text.
    pub fn json(&self, name: &str) -> Option<&str> {
        self.json.get(name).map(String::as_str)
    }

    /// Every name of JSON.
    pub fn json_names(&self) -> impl Iterator<Item = &str> {
        self.json.keys().map(String::as_str)
    }

    /// Sets JSON under any name. Refuses what is no JSON.
    pub fn set_json(&mut self, name: &str, json: impl Into<String>) -> Result<()> {
        let json = json.into();
        if let Err(error) = serde_json::from_str::<IgnoredAny>(&json) {
            return bad(name, error.to_string());
        }
        self.json.insert(name.to_owned(), json);
        Ok(())
    }

    /// The model's configuration, as JSON text.
    pub fn config(&self) -> Option<&str> {
        self.json(CONFIG)
    }

    /// Sets the model's configuration.
    pub fn set_config(&mut self, json: impl Into<String>) -> Result<()> {
        self.set_json(CONFIG, json)
    }

    /// Which modules are quantized and how, as JSON text: module → `{"weights": "qint8", "activations": "none"}`.
    pub fn quantization_map(&self) -> Option<&str> {
        self.json(QUANTIZATION_MAP)
    }

    /// The format that the quantization map speaks of, such as `quanto`.
    pub fn quantization_format(&self) -> Option<&str> {
        self.text.get(QUANTIZATION_FORMAT).map(String::as_str)
    }

    /// Sets the quantization map and its format.
    pub fn set_quantization(&mut self, format: &str, map: impl Into<String>) -> Result<()> {
        self.set_json(QUANTIZATION_MAP, map)?;
        self.text.insert(QUANTIZATION_FORMAT.to_owned(), format.to_owned());
        Ok(())
    }

    /// Tensors that are stored once under one name and used under others too: stored name → the other names. A hint of
    /// the writer's, to be compared with the model.
    pub fn tied_weights(&self) -> Result<BTreeMap<String, Vec<String>>> {
        let Some(json) = self.json(TIED_WEIGHTS) else { return Ok(BTreeMap::new()) };
        serde_json::from_str(json).or_else(|error| bad(TIED_WEIGHTS, error.to_string()))
    }

    /// Sets the tied weights; none removes the entry.
    pub fn set_tied_weights(&mut self, tied: &BTreeMap<String, Vec<String>>) {
        let json: serde_json::Map<_, _> = tied
            .iter()
            .map(|(name, others)| (name.clone(), serde_json::Value::from(others.clone())))
            .collect();
        if json.is_empty() {
            self.json.remove(TIED_WEIGHTS);
        } else {
            self.json.insert(TIED_WEIGHTS.to_owned(), serde_json::Value::Object(json).to_string());
        }
    }
}

/// The JSON that Base64 text stands for.
fn json_behind(value: &str) -> Result<String, String> {
    let bytes = base64::decode(value).ok_or("it is not Base64")?;
    let json = String::from_utf8(bytes).map_err(|_| "what it stands for is not UTF-8")?;
    serde_json::from_str::<IgnoredAny>(&json).map_err(|error| error.to_string())?;
    Ok(json)
}

fn bad<T>(key: &str, why: String) -> Result<T> {
    Err(CheckpointError::Metadata { key: key.to_owned(), why })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failure is the test's")]

    use super::*;

    fn stored(entries: &[(&str, &str)]) -> BTreeMap<String, String> {
        entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn everything_comes_back_as_it_was() {
        let mut metadata = ModelMetadata::default();
        metadata.text.insert("format".into(), "pt".into());
        metadata.set_config("{\"b\": 1, \"a\": \"é\"}").unwrap();
        metadata
            .set_quantization("quanto", r#"{"layer": {"weights": "qint8", "activations": "none"}}"#)
            .unwrap();
        metadata.set_json("extra", "[1, 2]").unwrap();
        let tied = BTreeMap::from([("embed.weight".to_owned(), vec!["head.weight".to_owned()])]);
        metadata.set_tied_weights(&tied);
        let stored = metadata.encode();
        let keys: Vec<_> = stored.keys().map(String::as_str).collect();
        let wanted = [
            "config_base64",
            "extra_base64",
            "format",
            "quantization_format",
            "quantization_map_base64",
            "tied_weights_map_base64",
        ];
        assert_eq!(keys, wanted);
        let again = ModelMetadata::decode(&stored).unwrap();
        assert_eq!(again, metadata);
        assert_eq!(again.config().unwrap(), "{\"b\": 1, \"a\": \"é\"}");
        assert_eq!(again.quantization_format(), Some("quanto"));
        assert_eq!(again.tied_weights().unwrap(), tied);
        assert_eq!(again.json("extra"), Some("[1, 2]"));
    }

    #[test]
    fn no_tied_weights_are_no_entry() {
        let mut metadata = ModelMetadata::default();
        metadata.set_tied_weights(&BTreeMap::from([("a".into(), vec![])]));
        metadata.set_tied_weights(&BTreeMap::new());
        assert!(metadata.encode().is_empty());
    }

    #[test]
    fn broken_entries_of_ours_are_refused_and_others_are_text() {
        for (key, value) in [
            ("config_base64", "not base64!"),
            ("config_base64", "e30"),
            ("quantization_map_base64", "/w=="),
            ("config_base64", "e30="), // {} is fine; the next one is `{`
            ("config_base64", "ew=="),
            ("tied_weights_map_base64", "e30="),
            ("tied_weights_map_base64", "WzFd"), // [1]
        ] {
            let found = ModelMetadata::decode(&stored(&[(key, value)]));
            assert_eq!(found.is_ok(), value == "e30=", "{key} {value}: {found:?}");
            if let Err(error) = found {
                assert!(error.to_string().contains(key.trim_end_matches("_base64")), "{error}");
            }
        }
        let found = ModelMetadata::decode(&stored(&[("thumbnail_base64", "/w=="), ("note", "x")])).unwrap();
        assert_eq!(found.text["thumbnail_base64"], "/w==");
        assert_eq!(found.json_names().count(), 0);
    }

    #[test]
    fn deep_json_is_refused_and_not_a_crash() {
        let deep = "[".repeat(100_000);
        assert!(ModelMetadata::default().set_config(deep).is_err());
    }
}
