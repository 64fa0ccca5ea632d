//! Keys of layers that the model does not have, told in a few sentences rather than in a thousand lines.

use std::collections::{BTreeMap, BTreeSet};

use super::matching::Missing;
use crate::names::{Family, collapse, is_number};
use crate::plan::Absent;

/// What people call the modules that are most often missing: a word of the module, a word of the layer, and the name.
const NAMES: &[(&str, &str, &str)] = &[
    ("cross_attn", "img", "image cross-attention"),
    ("attn2", "add", "image cross-attention"),
    ("", "img_emb", "image embedding"),
    ("", "image_embedder", "image embedding"),
];
/// The most layers that a sentence names.
const SHOWN: usize = 4;

#[derive(Default)]
struct Group {
    layers: BTreeSet<String>,
    blocks: BTreeSet<String>,
    keys: Vec<String>,
}

/// Sorts what is missing into groups: of another model, of one kind of block, or alone.
pub(super) fn summarize(
    missing: BTreeMap<&str, (Missing, Vec<String>)>,
    meant: Option<Family>,
) -> Vec<Absent> {
    let mut groups: BTreeMap<(Option<Family>, String), Group> = BTreeMap::new();
    for (Missing { family, flat, module }, keys) in missing.into_values() {
        // A prefix that names another model says all there is to say.
        let other = family.filter(|family| match meant {
            Some(meant) => *family != meant,
            // Nothing fits: unless the model has some of the name, it may be another.
            None => *family != Family::Denoiser && module.is_empty(),
        });
        let (place, layer) =
            if module.is_empty() { split_at_numbers(&flat) } else { split_at(&flat, module.len()) };
        let key = if other.is_some() { String::new() } else { collapse(place) };
        let group = groups.entry((other, key)).or_default();
        group.layers.insert(collapse(layer));
        group.blocks.insert(place.to_owned());
        group.keys.extend(keys);
    }
    groups.into_iter().map(|((family, module), group)| sentence(family, &module, group)).collect()
}

/// A name's part in front of its last number and that number, and the rest.
fn split_at_numbers(flat: &str) -> (&str, &str) {
    let mut end = 0;
    let mut at = 0;
    for part in flat.split('_') {
        at += part.len();
        if is_number(part) && at < flat.len() {
            end = at;
        }
        at += 1;
    }
    split_at(flat, end)
}

fn split_at(flat: &str, end: usize) -> (&str, &str) {
    let (module, layer) = flat.split_at(end);
    (module, layer.trim_start_matches('_'))
}

fn sentence(family: Option<Family>, module: &str, mut group: Group) -> Absent {
    group.keys.sort_unstable();
    let (keys, blocks) = (group.keys.len(), group.blocks.len());
    let count = match (blocks, keys % blocks.max(1)) {
        (2.., 0) => format!("{blocks} blocks × {} keys", keys / blocks),
        (2.., _) => format!("{keys} keys in {blocks} blocks"),
        _ => format!("{keys} keys"),
    };
    if let Some(family) = family {
        let summary = format!("{}: {keys} keys not in this model", family.words());
        return Absent { summary, keys: group.keys };
    }
    let shown: Vec<_> = group.layers.iter().take(SHOWN).map(String::as_str).collect();
    let more = group.layers.len() - shown.len();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let layers = format!("{}{more}", shown.join(", "));
    let all = |word: &str| {
        group.layers.iter().all(|layer| layer.split('_').any(|part| part == word) || layer.contains(word))
    };
    let name =
        NAMES.iter().find(|(place, layer, _)| module.contains(place) && all(layer)).map(|(_, _, name)| *name);
    let place = match (name, module.is_empty()) {
        (Some(name), true) => format!("{name} ({layers})"),
        (Some(name), false) => format!("{name} ({module}: {layers})"),
        (None, true) => layers,
        (None, false) => format!("{module}: {layers}"),
    };
    Absent { summary: format!("{place}: {count} not in this model"), keys: group.keys }
}
