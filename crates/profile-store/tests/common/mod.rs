//! What the tests share: an identity, entries, and bytes as they should not be.
#![allow(dead_code, clippy::unwrap_used, clippy::missing_panics_doc, reason = "tests; each uses a part")]

use profile_store::{Identity, Json};

/// The identity of all tests.
pub(crate) fn identity() -> Identity {
    Identity::named("video-5s", "WanTransformer3DModel").unwrap()
}

/// A good entry.
pub(crate) fn observation(peak: u32) -> Json {
    Json::object([
        ("kind", Json::text("observation")),
        ("written_at", Json::text("2026-01-01T00:00:00Z")),
        ("peak_vram_gb", Json::Number(peak.to_string())),
    ])
}

/// The text of a good file, with these entries as they are spelled, and more members at the top.
pub(crate) fn file(entries: &str, more: &str) -> String {
    let (key, value) = (identity().key().to_owned(), identity().value().canonical());
    format!(
        "{{\"schema_version\": 1, \"key\": \"{key}\", \"identity\": {value}, \"entries\": {{{entries}}}{more}}}"
    )
}

/// A good entry's text, with one field as it is given.
pub(crate) fn entry(field: &str) -> String {
    format!("{{\"kind\": \"observation\", \"written_at\": \"now\", {field}}}")
}
