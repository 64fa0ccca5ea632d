//! The fields of a header and of `adapter_config.json` that say how an adapter was trained.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::Owner;
use crate::error::{LoraError, Result};
use crate::kinds::{Made, refuse};
use crate::names::Family;

/// The longest text that is read as JSON.
const MAX_TEXT: usize = 4 << 20;
/// Fields that give alpha. Not kohya's `ss_network_alpha`: it says how a training began, and stays where a tool has since resized
/// the factors or taken alpha into them; what its trainer writes has alpha as tensors.
const ALPHA: &[&str] = &["lora_alpha", "network_alpha"];
/// Fields that give the rank.
const RANK: &[&str] = &["r", "rank", "lora_rank", "network_dim"];
/// Diffusers' field that holds the others as JSON.
const NESTED: &str = "lora_adapter_metadata";
/// Words that files write for no value.
const NOTHING: &[&str] = &["", "none", "null"];

/// What a namespace of the header says; its name is empty for fields without one.
#[derive(Debug, Clone, Default, PartialEq)]
struct Space {
    alpha: BTreeMap<String, f64>,
    rank: BTreeMap<String, f64>,
    alpha_pattern: Vec<(String, f64)>,
    rank_pattern: Vec<(String, f64)>,
    root: bool,
    dora: bool,
    /// Fields that cannot be read: whatever depends on them is ignored.
    bad: bool,
    /// A field for alpha without a word in it: the tool that wrote it had one, and lost it.
    blank: Option<String>,
}

/// Everything that a header or a configuration says.
#[derive(Debug, Clone, Default)]
pub(super) struct Fields {
    spaces: BTreeMap<String, Space>,
    /// Whether every low-rank adapter must have a magnitude.
    pub(super) dora: bool,
    /// The kind that PEFT names.
    pub(super) kind: Option<String>,
    /// The rank that PEFT names.
    pub(super) rank: Option<f64>,
    /// How PEFT's rotations and factors are meant.
    pub(super) tuning: Tuning,
}

/// What PEFT's configuration says of rotations and factors.
#[derive(Debug, Clone, Default)]
pub(super) struct Tuning {
    /// Whether a series stands for the inverse, and how many terms it has.
    pub(super) series: Option<(bool, Option<u64>)>,
    /// Whether rotations are kept small, which changes them where they are used.
    pub(super) constrained: bool,
    /// How small; what it is instead of a number is kept for a message.
    pub(super) freedom: Option<Result<f64, String>>,
    /// The layers whose inputs have factors: names, or one pattern.
    pub(super) feedforward: Option<Vec<String>>,
}

impl Tuning {
    fn of(entries: &serde_json::Map<String, Value>) -> Self {
        let texts = |value: &Value| match value {
            Value::Array(all) => all.iter().map(|one| one.as_str().map(str::to_owned)).collect(),
            Value::String(one) => Some(vec![one.clone()]),
            _ => None,
        };
        Self {
            series: entries
                .get("use_cayley_neumann")
                .and_then(Value::as_bool)
                .map(|is| (is, entries.get("num_cayley_neumann_terms").and_then(Value::as_u64))),
            constrained: entries.get("coft").is_some_and(truth),
            freedom: entries
                .get("eps")
                .map(|value| number(value).filter(|eps| *eps >= 0.0).ok_or_else(|| value.to_string())),
            feedforward: entries.get("feedforward_modules").and_then(texts),
        }
    }
}

/// An alpha that was told.
#[derive(Debug, Clone)]
pub(super) struct Told {
    pub(super) alpha: f64,
    /// Whether it stands over the root of the rank.
    pub(super) root: bool,
    /// Where it was said.
    pub(super) field: String,
}

impl PartialEq for Told {
    fn eq(&self, other: &Self) -> bool {
        self.alpha.to_bits() == other.alpha.to_bits() && self.root == other.root
    }
}

impl Fields {
    pub(super) fn of_header(metadata: &BTreeMap<String, String>, notes: &mut BTreeSet<String>) -> Self {
        let mut fields = Self::default();
        for (key, text) in metadata {
            if key == NESTED {
                match object(text) {
                    Ok(entries) => entries.iter().for_each(|(key, value)| fields.add(key, value, notes)),
                    Err(why) => {
                        notes.insert(format!("the header's {NESTED:?} cannot be read and is ignored: {why}"));
                    }
                }
            } else if text.len() <= 64 {
                fields.add(key, &Value::String(text.clone()), notes);
            }
        }
        fields
    }

    pub(super) fn of_config(text: &str, notes: &mut BTreeSet<String>) -> Result<Self> {
        let entries = object(text).map_err(|why| LoraError::Text { what: "adapter_config.json", why })?;
        let kind = entries.get("peft_type").and_then(Value::as_str).map(str::to_uppercase);
        let mut fields = Self { kind, tuning: Tuning::of(&entries), ..Self::default() };
        for (key, value) in &entries {
            // LoHa and LoKr of PEFT spell it without the prefix.
            let key = if key == "alpha" { "lora_alpha" } else { key };
            fields.add(key, value, notes);
        }
        if let Some(space) = fields.spaces.get("") {
            fields.dora = space.dora;
            fields.rank = space.rank.values().next().copied();
        }
        Ok(fields)
    }

    /// Takes a field, if it is one of those that matter here.
    fn add(&mut self, key: &str, value: &Value, notes: &mut BTreeSet<String>) {
        let (space, name) = key.rsplit_once('.').unwrap_or(("", key));
        let known = ALPHA.contains(&name) || RANK.contains(&name);
        if !known && !matches!(name, "alpha_pattern" | "rank_pattern" | "use_rslora" | "use_dora") {
            return;
        }
        let space = self.spaces.entry(space.to_owned()).or_default();
        match name {
            "use_rslora" => space.root = truth(value),
            "use_dora" => space.dora = truth(value),
            "alpha_pattern" | "rank_pattern" => {
                let entries = value.as_object().into_iter().flatten();
                let numbers: Option<Vec<_>> =
                    entries.map(|(pattern, value)| Some((pattern.clone(), number(value)?))).collect();
                match numbers {
                    Some(numbers) if name == "alpha_pattern" => space.alpha_pattern = numbers,
                    Some(numbers) => space.rank_pattern = numbers,
                    None => {
                        space.bad = true;
                        notes.insert(format!(
                            "{key:?} holds what is no number; the alpha beside it is ignored"
                        ));
                    }
                }
            }
            _ if ALPHA.contains(&name) && value.as_str().is_some_and(|text| text.trim().is_empty()) => {
                space.blank = Some(key.to_owned());
            }
            _ if is_nothing(value) => {}
            _ => match number(value) {
                Some(number) if ALPHA.contains(&name) => {
                    space.alpha.insert(key.to_owned(), number);
                }
                Some(number) => {
                    space.rank.insert(key.to_owned(), number);
                }
                None => {
                    space.bad = true;
                    notes.insert(format!(
                        "{key:?} is {value}, which is no number; it is ignored, and the scale is 1"
                    ));
                }
            },
        }
    }

    /// Whether a magnitude is due.
    pub(super) fn dora_for(&self, family: Option<Family>) -> bool {
        self.space(family).is_some_and(|(_, space)| space.dora)
    }

    /// The namespace that speaks of a model: its own, else the fields without one, else the denoiser's.
    fn space(&self, family: Option<Family>) -> Option<(&str, &Space)> {
        let named = |family: Family| family.spaces().iter().find_map(|name| self.spaces.get_key_value(*name));
        let own = family.and_then(named).or_else(|| self.spaces.get_key_value(""));
        let found = own.or_else(|| family.is_none().then(|| named(Family::Denoiser)).flatten());
        let only = || self.spaces.iter().next().filter(|_| self.spaces.len() == 1 && family.is_none());
        found.or_else(only).map(|(name, space)| (name.as_str(), space))
    }

    /// The alpha for layers of this rank, if there is one to be believed.
    pub(super) fn told(
        &self,
        owner: &Owner<'_>,
        rank: Option<f64>,
        notes: &mut BTreeSet<String>,
    ) -> Made<Option<Told>> {
        let Some((_, space)) = self.space(owner.family) else { return Ok(None) };
        if let Some(field) = &space.blank {
            return refuse(format!(
                "{field:?} is empty, and no tensor gives alpha: its scale is not known; write a number into it, or remove it for \
                 a scale of 1"
            ));
        }
        if space.bad {
            return Ok(None);
        }
        let own_alpha = pattern(&space.alpha_pattern, &owner.names)?;
        let own_rank = pattern(&space.rank_pattern, &owner.names)?;
        let named = |values: &BTreeMap<String, f64>| {
            let shown: Vec<_> = values.iter().map(|(field, value)| format!("{field:?} is {value}")).collect();
            shown.join(" and ")
        };
        for values in [&space.alpha, &space.rank] {
            let mut numbers = values.values();
            let first = numbers.next();
            if numbers.any(|number| Some(number) != first) {
                notes.insert(format!(
                    "{}: they contradict each other and are ignored, and the scale is 1",
                    named(values)
                ));
                return Ok(None);
            }
        }
        let Some((field, alpha)) =
            own_alpha.or_else(|| space.alpha.iter().next().map(|(k, v)| (k.clone(), *v)))
        else {
            return Ok(None);
        };
        let said = own_rank.or_else(|| space.rank.iter().next().map(|(k, v)| (k.clone(), *v)));
        let Some(rank) = rank else { return Ok(None) };
        if let Some((rank_field, said)) = said.filter(|(_, said)| (said - rank).abs() > 0.5) {
            notes.insert(format!(
                "{rank_field:?} is {said}, and the tensors are of rank {rank}: {field:?} is ignored there, and the scale is 1"
            ));
            return Ok(None);
        }
        Ok(Some(Told { alpha, root: space.root, field: format!("{field:?}") }))
    }
}

/// The value of the first pattern that names one of these layers.
fn pattern(patterns: &[(String, f64)], names: &[&str]) -> Made<Option<(String, f64)>> {
    for (pattern, value) in patterns {
        let plain = pattern.trim_start_matches('^').trim_end_matches('$').replace("\\.", ".");
        if plain.contains(['^', '$', '*', '+', '?', '(', ')', '[', ']', '{', '}', '|', '\\']) {
            return refuse(format!("its scale depends on the pattern {pattern:?}, which is not read"));
        }
        let fits = |name: &&str| {
            name.strip_suffix(plain.as_str()).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
        };
        if names.iter().any(fits) {
            return Ok(Some((pattern.clone(), *value)));
        }
    }
    Ok(None)
}

fn object(text: &str) -> Result<serde_json::Map<String, Value>, String> {
    if text.len() > MAX_TEXT {
        return Err(format!("it has {} bytes, more than {MAX_TEXT}", text.len()));
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(entries)) => Ok(entries),
        Ok(_) => Err("it is no object".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => NOTHING.contains(&text.trim().to_lowercase().as_str()),
        _ => false,
    }
}

fn truth(value: &Value) -> bool {
    matches!(value, Value::Bool(true))
        || value.as_str().is_some_and(|text| text.trim().eq_ignore_ascii_case("true"))
}

fn number(value: &Value) -> Option<f64> {
    let number = match value {
        Value::Number(number) => number.as_f64(),
        Value::String(text) => text.trim().parse().ok(),
        _ => None,
    };
    number.filter(|number| number.is_finite())
}
