//! Files of one model that are numbered by name: `model-00001-of-00012.safetensors`.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{CheckpointError, Limits, Result};

/// The parts of a shard's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ShardName<'a> {
    /// What comes before the number, with its hyphen.
    stem: &'a str,
    number: usize,
    /// The number of shards, as written.
    count: &'a str,
    /// What comes after, with its dot.
    suffix: &'a str,
}

impl<'a> ShardName<'a> {
    /// The parts of a name, if it is one of a shard. The last `-of-` counts: `a-1-of-2-of-3` is number 2 of 3.
    fn parse(name: &'a str) -> Option<Self> {
        let (left, right) = name.rsplit_once("-of-")?;
        let digits = right.find(|c: char| !c.is_ascii_digit()).unwrap_or(right.len());
        let (count, suffix) = right.split_at(digits);
        let number = left.rsplit_once('-').map_or(left, |(_, number)| number);
        let stem = &left[..left.len() - number.len()];
        let is_digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        (is_digits(number) && is_digits(count)).then_some(())?;
        Some(Self { stem, number: number.parse().ok()?, count, suffix })
    }

    fn is_of_the_same_model(&self, other: &Self) -> bool {
        (self.stem, self.count, self.suffix) == (other.stem, other.count, other.suffix)
    }
}

/// The name of the model a shard belongs to; `None` if the name is not one of a shard.
pub(crate) fn model_of(name: &str) -> Option<(&str, &str, &str)> {
    ShardName::parse(name).map(|shard| (shard.stem, shard.count, shard.suffix))
}

/// All files of the model that the file at `path` is one shard of, in the order of their numbers. `None` if its name is
/// not one of a shard.
///
/// # Errors
///
/// [`CheckpointError::MissingShards`] names all that are not there.
pub(crate) fn all_of(path: &Path, limits: &Limits) -> Result<Option<Vec<PathBuf>>> {
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(None) };
    let Some(shard) = ShardName::parse(name) else { return Ok(None) };
    let count = shard.count.parse().unwrap_or(usize::MAX);
    if count == 0 {
        return Ok(None);
    }
    if count > limits.max_files {
        return Err(CheckpointError::TooManyFiles { path: path.into(), limit: limits.max_files });
    }
    let folder = folder_of(path);
    let mut found = BTreeMap::new();
    for other in names(folder)? {
        let Some(parts) = ShardName::parse(&other).filter(|parts| parts.is_of_the_same_model(&shard)) else {
            continue;
        };
        if let Some(twice) = found.insert(parts.number, other.clone()) {
            let (first, second) = (folder.join(twice), folder.join(&other));
            return Err(CheckpointError::SameShard { number: parts.number, first, second });
        }
    }
    // Most count from one, some from zero.
    let first = usize::from(!found.contains_key(&0) || found.contains_key(&count));
    let wanted = first..first + count;
    let missing: Vec<_> = wanted.clone().filter(|number| !found.contains_key(number)).collect();
    if !missing.is_empty() {
        let width = name.len() - shard.stem.len() - shard.suffix.len() - shard.count.len() - "-of-".len();
        let name = |n| format!("{}{n:0width$}-of-{}{}", shard.stem, shard.count, shard.suffix);
        let missing = missing.into_iter().map(name).collect();
        return Err(CheckpointError::MissingShards { path: path.into(), count, missing });
    }
    if let Some((_, stray)) = found.iter().find(|(number, _)| !wanted.contains(number)) {
        return Err(CheckpointError::ShardNumber { path: folder.join(stray), count });
    }
    Ok(Some(found.into_values().map(|name| folder.join(name)).collect()))
}

/// The folder a file is in.
pub(crate) fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// The names of a folder's entries, sorted. Names that are not UTF-8 are not those of models and are left out.
pub(crate) fn names(folder: &Path) -> Result<Vec<String>> {
    let failed = |source| CheckpointError::Io { act: "list", path: folder.into(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort_unstable();
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_are_known_by_their_names() {
        let parse = |name| ShardName::parse(name).map(|s| (s.stem, s.number, s.count, s.suffix));
        assert_eq!(parse("m-00010-of-00012.safetensors"), Some(("m-", 10, "00012", ".safetensors")));
        assert_eq!(parse("a-b-c-1-of-2.x"), Some(("a-b-c-", 1, "2", ".x")));
        assert_eq!(parse("m.fp16-00001-of-00002.safetensors"), Some(("m.fp16-", 1, "00002", ".safetensors")));
        assert_eq!(parse("m-00001-of-00002.fp16.safetensors"), Some(("m-", 1, "00002", ".fp16.safetensors")));
        assert_eq!(parse("out-of-order-1-of-2.x"), Some(("out-of-order-", 1, "2", ".x")));
        for other in
            ["m.safetensors", "m-1.x", "m-x-of-2.x", "m-1-of-x.x", "out-of-order.x", "m-of-2.x", "m--of-2.x"]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
