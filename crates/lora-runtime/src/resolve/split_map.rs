//! The caller's own word on which layers are fused: `split_linear_modules_map`.

use serde_json::Value;

use crate::error::{LoraError, Result};
use crate::names::flatten;

/// The longest text that is read.
const MAX_TEXT: usize = 1 << 20;

/// A fused layer's name within its module, and the parts it is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SplitRule {
    /// The fused layer, flattened.
    pub(crate) fused: String,
    /// Its parts, in the order of their rows, flattened.
    pub(crate) parts: Vec<String>,
    /// Rows of each part, where the caller gives them.
    pub(crate) sizes: Option<Vec<u64>>,
}

/// All of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SplitMap {
    pub(crate) rules: Vec<SplitRule>,
}

fn wrong<T>(why: impl Into<String>) -> Result<T> {
    Err(LoraError::Text { what: "split_linear_modules_map", why: why.into() })
}

impl SplitMap {
    /// Reads a map of fused names to `{"mapped_modules": [...], "split_sizes": [...]}`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        if text.len() > MAX_TEXT {
            return wrong(format!("it has {} bytes, more than {MAX_TEXT}", text.len()));
        }
        let value: Value = match serde_json::from_str(text) {
            Ok(value) => value,
            Err(error) => return wrong(error.to_string()),
        };
        let Value::Object(entries) = value else { return wrong("it is no object") };
        let rules: Result<Vec<_>> = entries.iter().map(|(fused, entry)| rule(fused, entry)).collect();
        Ok(Self { rules: rules? })
    }
}

fn rule(fused: &str, entry: &Value) -> Result<SplitRule> {
    let Some(parts) = entry.get("mapped_modules").and_then(Value::as_array) else {
        return wrong(format!("{fused:?} has no list \"mapped_modules\""));
    };
    let names: Option<Vec<_>> = parts.iter().map(|part| part.as_str().map(flatten)).collect();
    let Some(parts) = names.filter(|names| names.len() > 1 && !names.iter().any(String::is_empty)) else {
        return wrong(format!("\"mapped_modules\" of {fused:?} are not the names of two layers or more"));
    };
    let sizes = match entry.get("split_sizes") {
        None | Some(Value::Null) => None,
        Some(Value::Array(sizes)) => {
            let read: Option<Vec<_>> =
                sizes.iter().map(|size| size.as_u64().filter(|size| *size > 0)).collect();
            match read {
                Some(read) if read.len() == parts.len() => Some(read),
                _ => {
                    return wrong(format!(
                        "\"split_sizes\" of {fused:?} are not a number of rows for each of {} parts",
                        parts.len()
                    ));
                }
            }
        }
        Some(_) => return wrong(format!("\"split_sizes\" of {fused:?} is no list")),
    };
    let fused = flatten(fused);
    if fused.is_empty() {
        return wrong("a fused layer has no name");
    }
    Ok(SplitRule { fused, parts, sizes })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn the_documented_shape_is_read() {
        let text = r#"{"attn.qkv": {"mapped_modules": ["q", "k", "v"], "split_sizes": [4, 2, 2]}, "kv": {"mapped_modules": ["k", "v"]}}"#;
        let map = SplitMap::parse(text).unwrap();
        assert_eq!(map.rules[0].fused, "attn_qkv");
        assert_eq!(map.rules[0].sizes, Some(vec![4, 2, 2]));
        assert_eq!((map.rules[1].parts.len(), &map.rules[1].sizes), (2, &None));
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        for (text, why) in [
            ("", "EOF"),
            ("[]", "no object"),
            (r#"{"qkv": 3}"#, "mapped_modules"),
            (r#"{"qkv": {"mapped_modules": ["q"]}}"#, "two layers"),
            (r#"{"qkv": {"mapped_modules": ["q", ""]}}"#, "two layers"),
            (r#"{"qkv": {"mapped_modules": ["q", "k"], "split_sizes": [1]}}"#, "split_sizes"),
            (r#"{"qkv": {"mapped_modules": ["q", "k"], "split_sizes": [1, -1]}}"#, "split_sizes"),
            (r#"{"qkv": {"mapped_modules": ["q", "k"], "split_sizes": 3}}"#, "no list"),
            (r#"{"": {"mapped_modules": ["q", "k"]}}"#, "no name"),
        ] {
            let error = SplitMap::parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
