//! Whose record it is: a small JSON object, whose hash names the file.

use sha2::{Digest, Sha256};

use crate::error::{Result, StoreError};
use crate::json::Json;

/// What a record is found by. Two identities are the same if their canonical JSON is.
///
/// ```
/// use profile_store::Identity;
/// let identity = Identity::named("video-5s", "WanTransformer3DModel")?;
/// assert_eq!(identity.file_name().len(), 64 + ".json".len());
/// assert_ne!(identity.key(), Identity::named("video-8s", "WanTransformer3DModel")?.key());
/// # Ok::<(), profile_store::StoreError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    value: Json,
    key: String,
}

impl Identity {
    /// A workload: the name that its user gave it, and the qualified name of the model's class. Nothing else counts.
    pub fn named(name: &str, model_class: &str) -> Result<Self> {
        for (what, text) in [("a profile's name", name), ("a model class's name", model_class)] {
            if text.trim().is_empty() {
                return Err(refused(what, "it is blank"));
            }
        }
        Self::of(Json::object([("name", Json::text(name)), ("model_class", Json::text(model_class))]))
    }

    /// Any JSON object.
    pub fn of(value: Json) -> Result<Self> {
        if value.members().is_none_or(<[_]>::is_empty) {
            return Err(refused("an identity", "it is no object with members"));
        }
        if let Some(flaw) = value.flaw() {
            return Err(refused("an identity", &flaw));
        }
        let hash = Sha256::digest(value.canonical().as_bytes());
        let digit = |half: u8| char::from_digit(half.into(), 16).unwrap_or_default();
        let key = hash.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect();
        Ok(Self { value, key })
    }

    /// The object.
    pub fn value(&self) -> &Json {
        &self.value
    }

    /// The SHA-256 of the canonical JSON, in hexadecimal.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The name of the record's file.
    pub fn file_name(&self) -> String {
        format!("{}.json", self.key)
    }
}

fn refused(what: &str, reason: &str) -> StoreError {
    StoreError::Refused { what: what.into(), reason: reason.into() }
}
