//! Any bytes as the index of a sharded model, read by us and by `serde_json`: what we accept, it reads the same.

use std::path::Path;

use checkpoint::{Limits, read_index};
use serde_json::Value;

/// Panics if anything is wrong.
pub(crate) fn run(data: &[u8]) {
    let Ok(index) = read_index(data, data.len() as u64, Path::new("fuzz"), &Limits::default()) else {
        return;
    };
    let document: Value = serde_json::from_slice(data).expect("we read it, so it is JSON");
    let map = document["weight_map"].as_object().expect("we read it, so it has a map");
    assert_eq!(map.len(), index.tensors.len());
    for (tensor, file) in &index.tensors {
        let file = &index.files[*file as usize];
        assert_eq!(map[tensor].as_str(), Some(file.as_str()));
    }
    assert!(index.tensors.is_sorted() && index.files.is_sorted());
    for file in &index.files {
        let mut parts = Path::new(file).components();
        let inside = matches!(parts.next(), Some(std::path::Component::Normal(_))) && parts.next().is_none();
        assert!(inside && !file.contains(['/', '\\', '\0']), "{file:?} is a path");
    }
}
