//! From a file's keys to a plan: which layers they speak of, what their tensors make there, and what becomes of the rest.

mod absent;
mod alias;
mod conflicts;
mod groups;
mod kin;
mod matching;
mod place;
mod scale;
mod split_map;
mod whole_model;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::error::Result;
use crate::file::AdapterFile;
use crate::key::{AdapterKey, Role, parse_key};
use crate::layers::Layers;
use crate::names::Family;
use crate::plan::{AdapterPlan, Refused};

pub(crate) use matching::Match;
pub(crate) use split_map::SplitMap;

/// How a file is to be taken.
#[derive(Debug, Clone, Default)]
pub struct ResolveOptions {
    /// Which layers are fused in the model or the file and apart in the other, as JSON:
    /// `{"qkv": {"mapped_modules": ["q", "k", "v"], "split_sizes": [16, 16, 16]}}`. What is usual is found without it.
    pub split: Option<String>,
    /// Which of a pipeline's models this is (`transformer`, `transformer_2`, `text_encoder` …): decides where keys of several of
    /// them would fit.
    pub component: Option<String>,
    /// Leaves out layers whose shapes do not fit, instead of refusing them.
    pub ignore_variations: bool,
}

/// Says for every key of an adapter file what it does to a model of these layers.
///
/// The order of the keys has no influence. Nothing is read and nothing is changed.
///
/// # Errors
/// If the options or the configuration beside the file cannot be read. What is wrong with the file's own keys is in the plan.
pub fn resolve(layers: &Layers, file: &AdapterFile, options: &ResolveOptions) -> Result<AdapterPlan> {
    let split = options.split.as_deref().map(SplitMap::parse).transpose()?.unwrap_or_default();
    let mut plan = AdapterPlan::default();
    let (keys, unread) = read_keys(file);
    plan.refused.extend(unread);
    plan.checkpoint = whole_model::sentence(layers, file);

    let spoken: BTreeMap<usize, Cow<'_, str>> =
        keys.iter().map(|(number, key)| (*number, layer_of(key))).collect();
    let names: BTreeSet<&str> = spoken.values().map(AsRef::as_ref).collect();
    let component = options.component.as_deref().and_then(Family::of_component);
    let (matches, meant) = matching::match_all(layers, &names, &split, component);
    let mut scales = scale::Scales::read(file)?;
    let mut unmatched: BTreeMap<&str, (matching::Missing, Vec<String>)> = BTreeMap::new();
    let mut found = groups::Groups::default();
    for (number, key) in &keys {
        let tensor = &file.tensors()[*number];
        let name: &str = &spoken[number];
        match &matches[name] {
            Match::Place(place, family) => found.add(place, *family, *key, tensor),
            Match::Missing(missing) => {
                let entry = unmatched.entry(name).or_insert_with(|| (missing.clone(), Vec::new()));
                entry.1.push(tensor.key.clone());
            }
            Match::Refused(reason) => {
                plan.refused.push(Refused { key: tensor.key.clone(), reason: reason.clone() });
            }
        }
    }
    found.resolve(layers, file, &mut scales, options.ignore_variations, &mut plan);
    conflicts::refuse(&mut plan);
    plan.absent = absent::summarize(unmatched, meant);
    plan.notes = scales.into_notes();
    plan.targets.sort_by(|a, b| {
        (&a.layer, a.kind, a.rows.as_ref().map(|r| r.start)).cmp(&(
            &b.layer,
            b.kind,
            b.rows.as_ref().map(|r| r.start),
        ))
    });
    plan.refused.sort();
    plan.skipped.sort();
    Ok(plan)
}

/// The layer that a key speaks of: `blocks.0.diff_m` is about the block's bare parameter.
fn layer_of<'a>(key: &AdapterKey<'a>) -> Cow<'a, str> {
    match key.role {
        Role::DiffModulation => Cow::Owned(format!("{}.modulation", key.layer)),
        _ => Cow::Borrowed(key.layer),
    }
}

/// The keys that are those of an adapter, by the number of their tensor, and what is said of the others.
fn read_keys(file: &AdapterFile) -> (BTreeMap<usize, AdapterKey<'_>>, Vec<Refused>) {
    let mut keys = BTreeMap::new();
    let mut refused = Vec::new();
    for (number, tensor) in file.tensors().iter().enumerate() {
        match parse_key(&tensor.key) {
            Ok(key) if key.role.is_scalar() || tensor.is_float() => {
                keys.insert(number, key);
            }
            Ok(_) => {
                let known = if tensor.is_known() {
                    "is no type of an adapter's numbers"
                } else {
                    "is no type that is known"
                };
                refused
                    .push(Refused { key: tensor.key.clone(), reason: format!("{} {known}", tensor.dtype) });
            }
            Err(reason) => refused.push(Refused { key: tensor.key.clone(), reason: reason.into() }),
        }
    }
    let words: BTreeSet<&str> = keys.values().filter_map(|key| key.word).collect();
    if words.len() > 1 {
        let named: Vec<_> = words.iter().take(3).map(|word| format!("{word:?}")).collect();
        let reason = format!("the file holds several adapters, {}; save each as a file", named.join(" and "));
        refused.extend(
            keys.keys().map(|n| Refused { key: file.tensors()[*n].key.clone(), reason: reason.clone() }),
        );
        keys.clear();
    }
    (keys, refused)
}
