//! The index of a sharded model against the files that are there, both ways.

use std::io;
use std::path::{Path, PathBuf};

use crate::index::{IndexProblem, ShardIndex};
use crate::{FileHeader, TensorInfo};

/// The paths of an index's files, all of which are there and in its folder.
pub(super) fn paths(folder: &Path, index: &ShardIndex) -> Result<Vec<PathBuf>, IndexProblem> {
    let canonical = folder.canonicalize().map_err(IndexProblem::Unreadable)?;
    // The hub's cache keeps `snapshots/<revision>/<name>` as links into `blobs/`, side by side.
    let blobs =
        canonical.parent().filter(|parent| parent.file_name().is_some_and(|name| name == "snapshots"));
    let blobs = blobs.and_then(Path::parent).map(|repository| repository.join("blobs"));
    let mut missing = Vec::new();
    let mut paths = Vec::new();
    for name in &index.files {
        let path = folder.join(name);
        match path.canonicalize() {
            Ok(real) => {
                let inside =
                    real.starts_with(&canonical) || blobs.as_ref().is_some_and(|b| real.starts_with(b));
                if !inside {
                    return Err(IndexProblem::Escapes { file: name.clone() });
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(name.clone()),
            Err(error) => return Err(IndexProblem::Unreadable(error)),
        }
        paths.push(path);
    }
    if missing.is_empty() {
        Ok(paths)
    } else {
        Err(IndexProblem::Missing { missing, named: index.files.len() })
    }
}

/// Compares an index with the files it names, which are at `places` in `headers`.
pub(super) fn compare(
    index: &ShardIndex,
    places: &[usize],
    headers: &[FileHeader],
    notes: &mut Vec<String>,
) -> Result<(), IndexProblem> {
    let mut held: Vec<_> = (0..places.len())
        .flat_map(|file| headers[places[file]].tensors.iter().map(move |tensor| (tensor.name.as_str(), file)))
        .collect();
    held.sort_unstable();
    for (tensor, file) in &index.tensors {
        let wanted = (tensor.as_str(), *file as usize);
        if held.binary_search(&wanted).is_err() {
            let found = held.binary_search_by(|(name, _)| (*name).cmp(tensor)).ok();
            let found = found.map(|at| index.files[held[at].1].clone());
            let file = index.files[wanted.1].clone();
            return Err(IndexProblem::NotInFile { tensor: tensor.clone(), file, found });
        }
    }
    let named = |name: &str| index.tensors.binary_search_by(|(tensor, _)| tensor.as_str().cmp(name)).is_ok();
    let mut unnamed = held.iter().filter(|(name, _)| !named(name));
    if let Some((name, file)) = unnamed.next() {
        let (count, file) = (1 + unnamed.count(), &index.files[*file]);
        notes.push(format!(
            "tensors that the index does not name were kept: {count}, the first {name:?} in {file:?}"
        ));
    }
    let total: u64 = places.iter().flat_map(|place| &headers[*place].tensors).map(TensorInfo::bytes).sum();
    if let Some(said) = index.total_size.filter(|said| *said != total) {
        notes.push(format!("the index says that the tensors have {said} bytes; they have {total}"));
    }
    Ok(())
}
