//! What a folder of files holds: which one to open, and which are left out.

use std::path::{Path, PathBuf};

use crate::error::some;
use crate::shards::{model_of, names};
use crate::{CheckpointError, Result};

const INDEX: &str = ".safetensors.index.json";
const MODEL: [&str; 2] = [".safetensors", ".gguf"];
/// The names under which transformers and diffusers keep a model that has one file.
const USUAL: [&str; 2] = ["model.safetensors", "diffusion_pytorch_model.safetensors"];

/// Whether a file is the index of a sharded model, by its name.
pub(crate) fn is_index(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "json")
}

/// Whether a name is that of a model file. Hidden files are none: some systems keep one beside each file.
fn is_model(name: &str) -> bool {
    !name.starts_with('.') && MODEL.iter().any(|suffix| name.ends_with(suffix))
}

/// The model files of a folder.
pub(crate) fn models(folder: &Path) -> Result<Vec<String>> {
    Ok(names(folder)?.into_iter().filter(|name| is_model(name)).collect())
}

/// The one file of a folder to open: its index, or one shard, or the only model. A note says what is left out.
pub(crate) fn choose(folder: &Path) -> Result<(PathBuf, Option<String>)> {
    let all = names(folder)?;
    let indexes: Vec<_> = all.iter().filter(|name| !name.starts_with('.') && name.ends_with(INDEX)).collect();
    match indexes[..] {
        // What an index does not name is noted by whoever opens it.
        [index] => return Ok((folder.join(index), None)),
        [] => {}
        _ => return ambiguous(folder, indexes.into_iter().cloned().collect()),
    }
    let models = models(folder)?;
    let Some(first) = models.first() else { return Err(CheckpointError::NoModel { path: folder.into() }) };
    let one_model =
        models[1..].iter().all(|name| model_of(name).is_some() && model_of(name) == model_of(first));
    if one_model {
        return Ok((folder.join(first), None));
    }
    let usual: Vec<_> = models.iter().filter(|name| USUAL.contains(&name.as_str())).collect();
    match usual[..] {
        [usual] => {
            let others = models.iter().filter(|name| *name != usual).map(String::as_str);
            Ok((folder.join(usual), left_out(usual, others)))
        }
        _ => ambiguous(folder, models),
    }
}

fn ambiguous<T>(folder: &Path, candidates: Vec<String>) -> Result<T> {
    Err(CheckpointError::Ambiguous { path: folder.into(), candidates })
}

/// A note on files that lie beside what was opened; `None` if there are none.
pub(crate) fn left_out<'a>(opened: &str, others: impl Iterator<Item = &'a str>) -> Option<String> {
    let others: Vec<_> = others.map(str::to_owned).collect();
    if others.is_empty() {
        return None;
    }
    Some(format!("{opened} was opened; not read were {}, which lie beside it", some(&others)))
}
