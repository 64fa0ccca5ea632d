//! Any text as the metadata of a model file, a line `key=value` an entry: nothing of it is lost, an entry that cannot be read is named and
//! is an error for who asks for it alone, and what is given out is JSON.

use std::collections::BTreeMap;

use checkpoint::ModelMetadata;
use serde_json::Value;

/// Panics if anything is wrong.
pub(crate) fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let entries = text.lines().filter_map(|line| line.split_once('='));
    let stored: BTreeMap<String, String> =
        entries.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    let metadata = ModelMetadata::decode(&stored);
    assert_eq!(metadata.encode(), stored);
    let broken: Vec<&str> = metadata.broken().map(|(key, _)| key).collect();
    assert!(broken.iter().all(|key| stored.contains_key(*key) && metadata.text.contains_key(*key)));
    let asked = [
        ("config_base64", metadata.config().map(|json| json.map(str::to_owned))),
        ("quantization_map_base64", metadata.quantization_map().map(|json| json.map(str::to_owned))),
        ("tied_weights_map_base64", metadata.tied_weights().map(|_| None)),
    ];
    for (key, found) in asked {
        assert_eq!(found.is_err(), broken.contains(&key), "{key}");
        if let Ok(Some(json)) = found {
            serde_json::from_str::<Value>(&json).expect("what is given out is JSON");
        }
    }
    for name in metadata.json_names() {
        let json = metadata.json(name).expect("it is one of the names");
        serde_json::from_str::<Value>(json).expect("what is given out is JSON");
    }
}
