//! Models in several GGUF files: which part a file says it is, and whether parts make a whole.

use std::collections::BTreeMap;
use std::path::Path;

use super::cursor::Cursor;
use super::value::Value;
use super::{GgufHeader, GgufProblem};
use crate::{CheckpointError, Result};

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";

/// Which part of a model a file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Split {
    /// Its number, from 0.
    pub number: u64,
    /// How many parts there are.
    pub count: u64,
    /// How many tensors all parts have together, if the file says it.
    pub tensors: Option<u64>,
}

/// What a file says of itself.
pub(super) fn of(cursor: &Cursor<'_>, values: &BTreeMap<String, Value>) -> Result<Option<Split>> {
    let integer = |key: &str| {
        let Some(value) = values.get(key) else { return Ok(None) };
        if let Some(number) = value.as_u64() {
            return Ok(Some(number));
        }
        let (key, found) = (key.to_owned(), value.describe());
        cursor.fail(GgufProblem::BadValue { key, found, wanted: "an integer from 0 on" })
    };
    let (number, count, tensors) = (integer(NUMBER)?, integer(COUNT)?, integer(TENSORS)?);
    match (number, count) {
        (Some(number), Some(count)) if number < count => Ok(Some(Split { number, count, tensors })),
        // A count of 0 or 1 without a number is how some writers say that a model is not split.
        (None, None | Some(0 | 1)) | (Some(0), None | Some(0)) => Ok(None),
        (number, count) => {
            let what = match (number, count) {
                (Some(number), Some(count)) => {
                    format!("it says that it is part {number} of {count}, counted from 0")
                }
                (Some(number), None) => {
                    format!("it says that it is part {number} of a split model, but has no `{COUNT}`")
                }
                (None, count) => {
                    let count = count.unwrap_or_default();
                    format!("it says that it is one of {count} parts, but has no `{NUMBER}`")
                }
            };
            cursor.fail(GgufProblem::Split { what })
        }
    }
}

/// Checks that files which say they are parts of a split model are all of it. Each comes with its path and how many tensors
/// it has.
///
/// One file that says it is split is refused without its other parts. Files that say nothing may be joined freely.
pub fn check_splits(parts: &[(&Path, &GgufHeader, usize)]) -> Result<()> {
    let Some((path, first)) = parts.iter().find_map(|part| Some((part.0, part.1.split()?))) else {
        return Ok(());
    };
    let fail = |path: &Path, what: String| Err(CheckpointError::gguf(path, GgufProblem::Split { what }));
    let mut seen = BTreeMap::new();
    for (path, header, _) in parts {
        let Some(split) = header.split() else {
            return fail(path, "it is no part of a split model, and files beside it are".into());
        };
        if split.count != first.count {
            let (own, others) = (split.count, first.count);
            return fail(path, format!("it says its model has {own} parts, and another part says {others}"));
        }
        if let Some(other) = seen.insert(split.number, *path) {
            return fail(
                path,
                format!("it is part {} of its model, and so is {}", split.number, other.display()),
            );
        }
    }
    if seen.len() as u64 != first.count {
        // The first gap: with no number above the count and none twice, there is one.
        let missing = (0..first.count).find(|number| !seen.contains_key(number)).unwrap_or_default();
        let (count, found) = (first.count, seen.len());
        return fail(
            path,
            format!("its model has {count} parts, {found} were given, and part {missing} is missing"),
        );
    }
    let found: u64 = parts.iter().map(|part| part.2 as u64).sum();
    match first.tensors {
        Some(said) if said != found => {
            fail(path, format!("it says that all parts have {said} tensors together, and they have {found}"))
        }
        _ => Ok(()),
    }
}
