//! Which layer a file means by a name: never guessed from separators, always looked up among the model's own names.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::alias::{Alias, aliases};
use super::kin::{as_fused, as_part};
use super::place::Place;
use super::split_map::SplitMap;
use crate::layers::{Found, Layers};
use crate::names::{Family, Stripped, flatten, strip, without_processor};

/// What became of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Match {
    /// It lies there; which of a pipeline's models its prefix named.
    Place(Place, Option<Family>),
    /// The model has no such layer.
    Missing(Missing),
    /// It could be several.
    Refused(String),
}

/// A name that the model does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Missing {
    /// Which of a pipeline's models its prefix named.
    pub(crate) family: Option<Family>,
    /// The name less its prefixes, flattened.
    pub(crate) flat: String,
    /// The beginning of it that the model does have, flattened.
    pub(crate) module: String,
}

/// A way to read one name.
struct Candidate<'a> {
    prefix: &'a str,
    family: Option<Family>,
    place: Result<Place, String>,
}

/// Looks all names up, and says which of a pipeline's models was meant, if that is known. `component` is which of a pipeline's models this is, where the caller knows.
pub(crate) fn match_all<'a>(
    layers: &Layers,
    names: &BTreeSet<&'a str>,
    split: &SplitMap,
    component: Option<Family>,
) -> (HashMap<&'a str, Match>, Option<Family>) {
    let read: Vec<_> = names.iter().map(|name| (*name, candidates(layers, name, split))).collect();
    // A name that can be read in two ways is read as the plain ones of its file are.
    let settled: BTreeSet<&str> =
        read.iter().filter(|(_, all)| distinct(all) == 1).map(|(_, all)| all[0].prefix).collect();
    let mut matches: HashMap<&str, Match> =
        read.into_iter().map(|(name, all)| (name, choose(layers, name, &all, &settled))).collect();
    let meant = one_model(&mut matches, component);
    (matches, meant)
}

fn distinct(candidates: &[Candidate<'_>]) -> usize {
    let mut places: Vec<_> = candidates.iter().map(|candidate| &candidate.place).collect();
    places.sort_unstable();
    places.dedup();
    places.len()
}

fn choose(layers: &Layers, name: &str, all: &[Candidate<'_>], settled: &BTreeSet<&str>) -> Match {
    let chosen = match distinct(all) {
        0 => return Match::Missing(missing(layers, name)),
        1 => all.first(),
        _ => {
            let mut usual = all.iter().filter(|candidate| settled.contains(candidate.prefix));
            usual.next().filter(|_| usual.next().is_none())
        }
    };
    match chosen {
        Some(Candidate { place: Ok(place), family, .. }) => Match::Place(place.clone(), *family),
        Some(Candidate { place: Err(reason), .. }) => Match::Refused(reason.clone()),
        None => {
            let named = all.iter().filter_map(|candidate| candidate.place.as_ref().ok());
            let named: Vec<_> = named.map(|place| place.describe(layers)).collect();
            Match::Refused(format!("{name:?} could be {}", named.join(" or ")))
        }
    }
}

fn missing(layers: &Layers, name: &str) -> Missing {
    let stripped = strip(name);
    let family = stripped.last().and_then(|last| last.family);
    // The reading of which the model has most.
    let readings = stripped.iter().map(|reading| {
        let flat = flatten(reading.rest);
        let ends = flat.match_indices('_').map(|(at, _)| at).filter(|at| layers.has_parent(&flat[..*at]));
        let module = ends.max().map_or(String::new(), |at| flat[..at].to_owned());
        Missing { family, flat, module }
    });
    // The last of those that are as long, which is the one with most prefixes off.
    readings.max_by_key(|reading| reading.module.len()).unwrap_or(Missing {
        family,
        flat: flatten(name),
        module: String::new(),
    })
}

type Look = fn(&Layers, &str, &str, &SplitMap) -> Vec<Result<Place, String>>;

/// Every way to read a name, of the surest kind that has any.
fn candidates<'a>(layers: &Layers, name: &'a str, split: &SplitMap) -> Vec<Candidate<'a>> {
    let stripped = strip(name);
    let tiers: [Look; 6] = [mapped, direct, old_processor, inner, related, aliased];
    for look in tiers {
        let mut found = Vec::new();
        for Stripped { prefix, rest, family } in &stripped {
            let flat = flatten(rest);
            let places = if flat.is_empty() { Vec::new() } else { look(layers, rest, &flat, split) };
            found.extend(places.into_iter().map(|place| Candidate { prefix, family: *family, place }));
        }
        if !found.is_empty() {
            return found;
        }
    }
    Vec::new()
}

fn place(layers: &Layers, found: Found, name: &str) -> Result<Place, String> {
    match found {
        Found::One(number) => Ok(Place::Whole(number)),
        Found::Many(numbers) => {
            let named: Vec<_> =
                numbers.iter().map(|number| format!("{:?}", layers.get(*number).name)).collect();
            Err(format!("{name:?} could be {}", named.join(" or ")))
        }
    }
}

/// Parts that the caller's map names and the model has under these names are parts, not layers.
fn mapped(layers: &Layers, _: &str, flat: &str, split: &SplitMap) -> Vec<Result<Place, String>> {
    if split.rules.is_empty() || layers.flat(flat).is_some() {
        return Vec::new();
    }
    relations(layers, flat, split)
}

fn direct(layers: &Layers, name: &str, flat: &str, _: &SplitMap) -> Vec<Result<Place, String>> {
    if let Some(number) = layers.exact(name) {
        return vec![Ok(Place::Whole(number))];
    }
    layers.flat(flat).map(|found| place(layers, found, name)).into_iter().collect()
}

fn old_processor(layers: &Layers, name: &str, flat: &str, _: &SplitMap) -> Vec<Result<Place, String>> {
    let names = without_processor(flat).into_iter().flatten();
    names.filter_map(|flat| layers.flat(&flat)).map(|found| place(layers, found, name)).take(1).collect()
}

fn inner(layers: &Layers, name: &str, flat: &str, _: &SplitMap) -> Vec<Result<Place, String>> {
    layers.inner(flat).map(|found| place(layers, found, name)).into_iter().collect()
}

fn related(layers: &Layers, _: &str, flat: &str, _: &SplitMap) -> Vec<Result<Place, String>> {
    relations(layers, flat, &SplitMap::default())
}

/// Layers that the model keeps together or apart where the file does not.
fn relations(layers: &Layers, flat: &str, split: &SplitMap) -> Vec<Result<Place, String>> {
    let one = |flat: &str| match layers.flat(flat) {
        Some(Found::One(number)) => Some(number),
        _ => None,
    };
    let mut places = Vec::new();
    for relation in as_fused(flat, split) {
        let parts: Option<Vec<_>> = relation.parts.iter().map(|part| one(part)).collect();
        if let Some(layers) = parts {
            places.push(Ok(Place::Several { layers, sizes: relation.sizes }));
        }
    }
    for (relation, number) in as_part(flat, split) {
        if let Some(layer) = one(&relation.fused) {
            let (count, sizes, share) = (relation.parts.len(), relation.sizes, relation.share);
            places.push(Ok(Place::Within { layer, number, count, sizes, share }));
        }
    }
    places.dedup();
    places
}

/// The same architecture under another writer's names.
fn aliased(layers: &Layers, _: &str, flat: &str, _: &SplitMap) -> Vec<Result<Place, String>> {
    let one = |flat: &str| match layers.flat(flat).or_else(|| layers.inner(flat)) {
        Some(Found::One(number)) => Some(number),
        _ => None,
    };
    let read = |alias| match alias {
        Alias::Layers { names, swapped } => {
            let numbers: Vec<_> = names.iter().map(|name| one(name)).collect::<Option<_>>()?;
            Some(match numbers[..] {
                [number] if swapped => Place::Swapped(number),
                [number] => Place::Whole(number),
                _ => Place::Several { layers: numbers, sizes: None },
            })
        }
        Alias::Part { fused, number, count } => {
            let share =
                if count == 4 { super::kin::Share::AttentionAndRest } else { super::kin::Share::Attention };
            Some(Place::Within { layer: one(&fused)?, number, count, sizes: None, share })
        }
    };
    aliases(flat).into_iter().filter_map(read).map(Ok).collect()
}

/// Where the keys of several of a pipeline's models fit, one of them is meant: the one the caller named, or the one of which most
/// fits. The others' are not this model's.
fn one_model(matches: &mut HashMap<&str, Match>, component: Option<Family>) -> Option<Family> {
    let mut scores: BTreeMap<Family, (usize, usize)> = BTreeMap::new();
    for found in matches.values() {
        let (family, fits) = match found {
            Match::Place(_, Some(family)) => (*family, 1),
            Match::Missing(Missing { family: Some(family), .. }) => (*family, 0),
            _ => continue,
        };
        let score = scores.entry(family).or_default();
        *score = (score.0 + fits, score.1 + 1);
    }
    scores.retain(|_, (fits, _)| *fits > 0);
    let meant = meant(&scores, component);
    for (name, found) in matches.iter_mut() {
        let Match::Place(_, Some(family)) = found else { continue };
        match &meant {
            Ok(Some(meant)) if meant != family => {
                let flat = strip(name).last().map_or_else(|| flatten(name), |last| flatten(last.rest));
                *found = Match::Missing(Missing { family: Some(*family), flat, module: String::new() });
            }
            Ok(_) => {}
            Err(alike) => {
                let words: Vec<_> = alike.iter().map(|family| family.words()).collect();
                *found = Match::Refused(format!(
                    "the file has keys for {}, which fit this model alike",
                    words.join(" and ")
                ));
            }
        }
    }
    meant.unwrap_or_default()
}

/// Of families and how many of their names fit, out of how many, the one that is meant; those that fit alike, if nobody can say.
fn meant(
    scores: &BTreeMap<Family, (usize, usize)>,
    component: Option<Family>,
) -> Result<Option<Family>, Vec<Family>> {
    if let Some(own) =
        component.filter(|own| scores.contains_key(own) || scores.keys().all(|f| f.is_not(*own)))
    {
        return Ok(Some(own));
    }
    // The larger share of its keys, then the larger number.
    let better = |a: (usize, usize), b: (usize, usize)| (a.0 * b.1).cmp(&(b.0 * a.1)).then(a.0.cmp(&b.0));
    let best = scores.values().copied().max_by(|a, b| better(*a, *b)).unwrap_or_default();
    let first: Vec<_> =
        scores.iter().filter(|(_, score)| better(**score, best).is_eq()).map(|(family, _)| *family).collect();
    match first[..] {
        [] => Ok(None),
        [one] => Ok(Some(one)),
        _ => Err(first),
    }
}
