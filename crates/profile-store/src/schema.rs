//! The published JSON schema, made from the same table as the reader's checks.

use crate::json::Json;
use crate::rules::{Kind, VERSION, Value};

/// The JSON schema (2020-12) of a file, with these kinds of entries.
pub fn schema(kinds: &[Kind]) -> Json {
    let text = Json::text;
    let typed = |name: &'static str| Json::object([("type", text(name))]);
    let key = Json::object([("type", text("string")), ("pattern", text("^[0-9a-f]{64}$"))]);
    let set_aside = Json::object([
        ("type", text("object")),
        ("required", Json::List(vec![text("reason"), text("text")])),
        ("properties", Json::object([("reason", typed("string")), ("text", typed("string"))])),
    ]);
    let entry = Json::object([
        ("type", text("object")),
        ("required", Json::List(vec![text("kind")])),
        ("properties", Json::object([("kind", typed("string")), ("version", count())])),
        ("allOf", Json::List(kinds.iter().map(rule).collect())),
    ]);
    let members = |value: Json| Json::object([("type", text("object")), ("additionalProperties", value)]);
    Json::object([
        ("$schema", text("https://json-schema.org/draft/2020-12/schema")),
        ("title", text("A named record of profile-store")),
        (
            "description",
            text("Fields, kinds of entries and versions that are not described here are kept by writers."),
        ),
        ("type", text("object")),
        ("required", Json::List(["schema_version", "key", "identity", "entries"].map(text).to_vec())),
        (
            "properties",
            Json::object([
                ("schema_version", count()),
                ("key", key),
                ("identity", Json::object([("type", text("object")), ("minProperties", number(1))])),
                ("updated_at", typed("string")),
                ("entries", members(entry)),
                ("set_aside", members(set_aside)),
            ]),
        ),
    ])
}

fn number(value: u64) -> Json {
    Json::Number(value.to_string())
}

fn count() -> Json {
    Json::object([("type", Json::text("integer")), ("minimum", number(0))])
}

/// If an entry is of the kind and no newer, then its fields are as the table says.
fn rule(kind: &Kind) -> Json {
    let constant = Json::object([("const", Json::text(kind.name))]);
    let current = Json::object([("type", Json::text("integer")), ("maximum", number(VERSION))]);
    let condition = Json::object([
        ("required", Json::List(vec![Json::text("kind")])),
        ("properties", Json::object([("kind", constant), ("version", current)])),
    ]);
    let properties = kind.fields.iter().map(|field| (field.name, of(field.value)));
    let required = kind.fields.iter().filter(|field| field.required).map(|field| Json::text(field.name));
    let consequence = Json::object([
        ("properties", Json::object(properties)),
        ("required", Json::List(required.collect())),
    ]);
    Json::object([("if", condition), ("then", consequence)])
}

fn of(value: Value) -> Json {
    let kind = match value {
        Value::Text => "string",
        Value::Flag => "boolean",
        Value::Object => "object",
        Value::Count => return count(),
        Value::Amount => {
            return Json::object([("type", Json::text("number")), ("minimum", number(0))]);
        }
    };
    Json::object([("type", Json::text(kind))])
}
