//! What a model file says of its model in its metadata: configuration, quantization map, tied weights. A header holds text
//! only, so that JSON is stored as Base64 under a key that ends with `_base64`.

mod base64;

use std::collections::BTreeMap;

use serde_json::Value;

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
/// assert_eq!(ModelMetadata::decode(&stored).config()?, Some(r#"{"hidden_size": 64}"#));
/// # Ok::<(), checkpoint::CheckpointError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ModelMetadata {
    /// Text, by key. What ends with `_base64` and stands for no JSON is here as it was stored.
    pub text: BTreeMap<String, String>,
    json: BTreeMap<String, String>,
    /// What is wrong with entries of ours, by their keys. One may be broken and of no use for what is asked of the file.
    broken: BTreeMap<String, String>,
}

impl ModelMetadata {
    /// Takes the metadata of a file apart. A key that ends with `_base64` loses that ending if JSON is behind it. A configuration,
    /// quantization map or tied map that cannot be read is an error for who asks for it; [`ModelMetadata::broken`] names it before.
    pub fn decode(stored: &BTreeMap<String, String>) -> Self {
        let mut metadata = Self::default();
        for (key, value) in stored {
            let behind = key.strip_suffix(SUFFIX).map(|name| (name, json_of(name, value)));
            match behind {
                Some((name, Ok(json))) => {
                    metadata.json.insert(name.to_owned(), json);
                    continue;
                }
                Some((name, Err(why))) if KNOWN.contains(&name) => {
                    metadata.broken.insert(key.clone(), why);
                }
                _ => {}
            }
            metadata.text.insert(key.clone(), value.clone());
        }
        metadata
    }

    /// The entries that say something of the model and cannot be read: key, and what is wrong. Worth a warning to the user.
    pub fn broken(&self) -> impl Iterator<Item = (&str, &str)> {
        self.broken.iter().map(|(key, why)| (key.as_str(), why.as_str()))
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
        if let Err(error) = serde_json::from_str::<Value>(&json) {
            return bad(name, error.to_string());
        }
        self.forget(name);
        self.json.insert(name.to_owned(), json);
        Ok(())
    }

    /// The model's configuration, as JSON text. An error if it is there and cannot be read.
    pub fn config(&self) -> Result<Option<&str>> {
        self.known(CONFIG)
    }

    /// Sets the model's configuration.
    pub fn set_config(&mut self, json: impl Into<String>) -> Result<()> {
        self.set_json(CONFIG, json)
    }

    /// Which modules are quantized and how, as JSON text: module → `{"weights": "qint8", "activations": "none"}`.
    /// An error if it is there and cannot be read.
    pub fn quantization_map(&self) -> Result<Option<&str>> {
        self.known(QUANTIZATION_MAP)
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
    /// the writer's, to be compared with the model. An error if it is there and cannot be read.
    pub fn tied_weights(&self) -> Result<BTreeMap<String, Vec<String>>> {
        let Some(json) = self.known(TIED_WEIGHTS)? else { return Ok(BTreeMap::new()) };
        serde_json::from_str(json).or_else(|error| bad(TIED_WEIGHTS, error.to_string()))
    }

    /// Sets the tied weights; none removes the entry.
    pub fn set_tied_weights(&mut self, tied: &BTreeMap<String, Vec<String>>) {
        let json: serde_json::Map<_, _> =
            tied.iter().map(|(name, others)| (name.clone(), Value::from(others.clone()))).collect();
        self.forget(TIED_WEIGHTS);
        if !json.is_empty() {
            self.json.insert(TIED_WEIGHTS.to_owned(), Value::Object(json).to_string());
        }
    }

    /// JSON of ours.
    fn known(&self, name: &str) -> Result<Option<&str>> {
        let key = format!("{name}{SUFFIX}");
        match self.broken.get(&key) {
            Some(why) => bad(&key, why.clone()),
            None => Ok(self.json(name)),
        }
    }

    /// Takes JSON away, whether or not it could be read.
    fn forget(&mut self, name: &str) {
        self.json.remove(name);
        let key = format!("{name}{SUFFIX}");
        if self.broken.remove(&key).is_some() {
            self.text.remove(&key);
        }
    }
}

/// The JSON that Base64 text stands for, of the form that its name asks for.
fn json_of(name: &str, value: &str) -> Result<String, String> {
    let json = json_behind(value)?;
    if name == TIED_WEIGHTS {
        serde_json::from_str::<BTreeMap<String, Vec<String>>>(&json).map_err(|error| error.to_string())?;
    }
    Ok(json)
}

/// The JSON that Base64 text stands for.
fn json_behind(value: &str) -> Result<String, String> {
    let bytes = base64::decode(value).ok_or("it is not Base64")?;
    let json = String::from_utf8(bytes).map_err(|_| "what it stands for is not UTF-8")?;
    serde_json::from_str::<Value>(&json).map_err(|error| error.to_string())?;
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
        let again = ModelMetadata::decode(&stored);
        assert_eq!(again, metadata);
        assert_eq!(again.broken().count(), 0);
        assert_eq!(again.config().unwrap().unwrap(), "{\"b\": 1, \"a\": \"é\"}");
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
    fn a_broken_entry_of_ours_is_an_error_for_who_asks_for_it_alone() {
        for (key, value) in [
            ("config_base64", "not base64!"),
            ("config_base64", "e30"),
            ("quantization_map_base64", "/w=="),
            ("config_base64", "ew=="),             // `{`
            ("config_base64", "eyJhIjogMWU5OTl9"), // {"a": 1e999}
            ("tied_weights_map_base64", "e30"),
            ("tied_weights_map_base64", "WzFd"), // [1]
        ] {
            let title = ("title", "a");
            let stored = stored(&[(key, value), title]);
            let mut found = ModelMetadata::decode(&stored);
            assert_eq!(found.text["title"], "a");
            assert_eq!(found.encode(), stored, "it is kept as it is");
            assert_eq!(found.broken().map(|(key, _)| key).collect::<Vec<_>>(), [key]);
            let asked = [
                found.config().map(drop),
                found.quantization_map().map(drop),
                found.tied_weights().map(drop),
            ];
            for (name, asked) in KNOWN.iter().zip(asked) {
                assert_eq!(asked.is_err(), key.starts_with(name), "{key} {value}: {asked:?}");
                assert!(asked.map_or_else(|error| error.to_string().contains(key), |()| true));
            }
            found.set_config("{}").unwrap();
            found.set_quantization("quanto", "{}").unwrap();
            found.set_tied_weights(&BTreeMap::new());
            assert_eq!(found.broken().count(), 0);
            let tied = found.tied_weights().unwrap();
            assert!(tied.is_empty() && !found.encode().contains_key("tied_weights_map_base64"));
        }
        let found =
            ModelMetadata::decode(&stored(&[("config_base64", "e30="), ("thumbnail_base64", "/w==")]));
        assert_eq!((found.config().unwrap(), found.broken().count()), (Some("{}"), 0));
        assert_eq!(found.text["thumbnail_base64"], "/w==");
        assert_eq!(found.json_names().collect::<Vec<_>>(), ["config"]);
    }

    #[test]
    fn deep_json_is_refused_and_not_a_crash() {
        let deep = "[".repeat(100_000);
        assert!(ModelMetadata::default().set_config(deep).is_err());
    }
}
