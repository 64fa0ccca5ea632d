#![doc = include_str!("../README.md")]
//! The order of inputs is that of their paths, so that a failure is the same one everywhere.
#![forbid(unsafe_code)]

use std::fs;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

/// Why a replay is no success.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// A target without inputs tests nothing.
    #[error("{target} has no corpus: put inputs into {}", folder.display())]
    NoCorpus {
        /// The target.
        target: String,
        /// Where its inputs belong.
        folder: PathBuf,
    },
    /// The target panicked; its message went to standard error.
    #[error("{target} fails on {}", input.display())]
    Failed {
        /// The target.
        target: String,
        /// The first input that it fails on.
        input: PathBuf,
    },
    /// The system failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Runs `target` on each file below `fuzz/corpus/NAME` of a crate's folder, and on each below its `tests/corpus`, which other
/// tests of the crate use. Returns how many there were.
///
/// # Errors
/// If there is no input of its own, if the target panics on one, or if the system cannot read one.
pub fn replay(crate_folder: &Path, name: &str, target: impl Fn(&[u8])) -> Result<usize, ReplayError> {
    let own = crate_folder.join("fuzz/corpus").join(name);
    let mut inputs = files(&own)?;
    if inputs.is_empty() {
        return Err(ReplayError::NoCorpus { target: name.into(), folder: own });
    }
    inputs.extend(files(&crate_folder.join("tests/corpus"))?);
    for path in &inputs {
        let input = fs::read(path)?;
        catch_unwind(AssertUnwindSafe(|| target(&input)))
            .map_err(|_| ReplayError::Failed { target: name.into(), input: path.clone() })?;
    }
    Ok(inputs.len())
}

/// Every file below a folder, in the order of their paths; none if there is no such folder.
fn files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut open = vec![folder.to_path_buf()];
    let mut files = Vec::new();
    while let Some(folder) = open.pop() {
        let entries = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            entries => entries?,
        };
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() { open.push(path) } else { files.push(path) }
        }
    }
    files.sort_unstable();
    Ok(files)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn every_input_is_run_once_and_a_failure_names_its_own() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(replay(folder.path(), "x", |_| ()), Err(ReplayError::NoCorpus { .. })));
        for (path, content) in
            [("fuzz/corpus/x/deep/a", "a"), ("fuzz/corpus/x/b", "b"), ("tests/corpus/c", "c")]
        {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        let seen = RefCell::new(Vec::new());
        let count = replay(folder.path(), "x", |bytes| seen.borrow_mut().extend_from_slice(bytes)).unwrap();
        assert_eq!((count, seen.into_inner()), (3, b"bac".to_vec()));
        let error = replay(folder.path(), "x", |bytes| assert_ne!(bytes, b"a")).unwrap_err();
        assert!(error.to_string().ends_with("x/deep/a"), "{error}");
    }
}
