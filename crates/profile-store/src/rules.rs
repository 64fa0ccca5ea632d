//! What entries may hold: one table, from which the reader's checks and the published JSON schema are both made.

use crate::json::Json;

/// The version of files and entries that this crate writes.
pub const VERSION: u64 = 1;

/// What a field holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Value {
    /// Any text.
    Text,
    /// A finite number, from 0 on.
    Amount,
    /// A whole number, from 0 on.
    Count,
    /// True or false.
    Flag,
    /// An object of anything.
    Object,
}

/// A field of an entry. Fields that are in no table are kept and not looked at.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// What it holds.
    pub value: Value,
    /// Whether an entry without it is none.
    pub required: bool,
}

/// A kind of entry: the value of its `kind` field, and what it must look like. Entries of other kinds are kept.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    /// Its fields.
    pub fields: &'static [Field],
}

const fn required(name: &'static str, value: Value) -> Field {
    Field { name, value, required: true }
}

const fn optional(name: &'static str, value: Value) -> Field {
    Field { name, value, required: false }
}

/// The kinds that a profile of a workload has.
pub const PROFILE: &[Kind] = &[
    Kind {
        name: "recommendation",
        fields: &[
            optional("resident_module_budget_gb", Value::Amount),
            optional("sdnq_probe_resident_budget_gb", Value::Amount),
            optional("sdnq_safe_resident_budget_gb", Value::Amount),
            optional("execution_mode", Value::Text),
            optional("profile_measurement_kind", Value::Text),
            optional("written_at", Value::Text),
        ],
    },
    Kind {
        name: "observation",
        fields: &[
            required("written_at", Value::Text),
            optional("sequence", Value::Count),
            optional("status", Value::Text),
            optional("peak_vram_gb", Value::Amount),
            optional("total_vram_gb", Value::Amount),
            optional("headroom_gb", Value::Amount),
            optional("profile_measurement_kind", Value::Text),
            optional("measurement", Value::Object),
        ],
    },
    Kind {
        name: "capacity",
        fields: &[optional("max_success", Value::Amount), optional("min_failure", Value::Amount)],
    },
];

/// What became of an entry that was looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is of a known kind and as it should be.
    Good,
    /// It is of an unknown kind or a newer version: kept, and not understood.
    Opaque,
    /// It cannot be what it says; the reason.
    Bad(String),
}

/// Looks at an entry.
pub fn judge(kinds: &[Kind], entry: &Json) -> Verdict {
    if let Some(flaw) = entry.flaw() {
        return Verdict::Bad(flaw);
    }
    let bad = |text: String| Verdict::Bad(text);
    if entry.members().is_none() {
        return bad(format!("it is of type {}, not object", entry.kind()));
    }
    let kind = match entry.get("kind") {
        Some(Json::Text(kind)) => kind,
        Some(other) => return bad(format!("its kind is of type {}, not string", other.kind())),
        None => return bad("it has no kind".into()),
    };
    match entry.get("version") {
        None => {}
        Some(version) => match version.as_u64() {
            Some(newer) if newer > VERSION => return Verdict::Opaque,
            Some(_) => {}
            None => return bad("its version is no whole number".into()),
        },
    }
    let Some(kind) = kinds.iter().find(|own| own.name == kind) else { return Verdict::Opaque };
    for field in kind.fields {
        match entry.get(field.name) {
            None if field.required => return bad(format!("it has no {}", field.name)),
            None => {}
            Some(value) => {
                if let Some(reason) = wrong(field.value, value) {
                    return bad(format!("{} {reason}", field.name));
                }
            }
        }
    }
    Verdict::Good
}

fn wrong(wanted: Value, value: &Json) -> Option<String> {
    let other = |wanted: &str| Some(format!("is of type {}, not {wanted}", value.kind()));
    match (wanted, value) {
        (Value::Text, Json::Text(_)) | (Value::Flag, Json::Bool(_)) | (Value::Object, Json::Object(_)) => {
            None
        }
        (Value::Text, _) => other("string"),
        (Value::Flag, _) => other("boolean"),
        (Value::Object, _) => other("object"),
        (Value::Amount, Json::Number(text)) => match value.as_f64() {
            None => Some(format!("is {text}, more than a number can be")),
            Some(number) if number < 0.0 => Some(format!("is {text}, below 0")),
            Some(_) => None,
        },
        (Value::Count, Json::Number(text)) => {
            value.as_u64().is_none().then(|| format!("is {text}, no whole number from 0 on"))
        }
        (Value::Amount | Value::Count, _) => other("number"),
    }
}
