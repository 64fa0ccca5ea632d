//! The published schema is the one that the reader checks by, and files that the store writes are valid under it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::path::Path;
use std::{env, fs};

use common::{entry, file, identity, observation};
use profile_store::rules::{PROFILE, Verdict, judge};
use profile_store::{Json, Store, schema};
use proptest::prelude::*;

/// Set to write the schema instead of comparing it.
const WRITE: &str = "PROFILE_STORE_WRITE_SCHEMA";

#[test]
fn the_schema_in_the_repository_is_the_one_that_is_made() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/profile-v1.schema.json");
    let made = schema(PROFILE).pretty();
    if env::var_os(WRITE).is_some() {
        fs::write(&path, &made).unwrap();
    }
    assert_eq!(fs::read_to_string(&path).unwrap(), made, "write it again with {WRITE}=1");
}

/// As much of JSON Schema as ours uses; refuses words that it does not know.
fn valid(schema: &Json, value: &Json) -> bool {
    let Some(rules) = schema.members() else { panic!("{schema:?}") };
    rules.iter().all(|(word, rule)| match word.as_str() {
        "$schema" | "title" | "description" | "then" => true,
        "type" => match rule.as_text().unwrap() {
            "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
            "number" => value.as_f64().is_some(),
            kind => value.kind() == kind,
        },
        "const" => value == rule,
        "minimum" => value.as_f64().is_none_or(|number| number >= rule.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|number| number <= rule.as_f64().unwrap()),
        "pattern" => {
            assert_eq!(rule.as_text(), Some("^[0-9a-f]{64}$"));
            value
                .as_text()
                .is_none_or(|t| t.len() == 64 && t.bytes().all(|b| b"0123456789abcdef".contains(&b)))
        }
        "minProperties" => value.members().is_none_or(|m| m.len() as u64 >= rule.as_u64().unwrap()),
        "required" => {
            let Json::List(names) = rule else { panic!("{rule:?}") };
            value.members().is_none() || names.iter().all(|name| value.get(name.as_text().unwrap()).is_some())
        }
        "properties" => {
            let named = rule.members().unwrap();
            named.iter().all(|(name, rule)| value.get(name).is_none_or(|member| valid(rule, member)))
        }
        "additionalProperties" => value.members().unwrap_or_default().iter().all(|(_, v)| valid(rule, v)),
        "allOf" => {
            let Json::List(rules) = rule else { panic!("{rule:?}") };
            rules.iter().all(|rule| valid(rule, value))
        }
        "if" => !valid(rule, value) || valid(schema.get("then").unwrap(), value),
        other => panic!("the schema has a word that this test does not know: {other}"),
    })
}

fn entries_rule(schema: &Json) -> &Json {
    schema
        .get("properties")
        .and_then(|p| p.get("entries"))
        .and_then(|e| e.get("additionalProperties"))
        .unwrap()
}

#[test]
fn what_the_store_writes_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let damaged =
        file(&format!("\"bad\": {}, \"o\": {{\"kind\": \"x\"}}", entry("\"peak_vram_gb\": NaN")), "");
    fs::write(folder.path().join(identity().file_name()), damaged).unwrap();
    let store = Store::at(folder.path());
    store.update(&identity(), |record| record.put("a", observation(1))).unwrap();
    let written = Json::parse(&fs::read(folder.path().join(identity().file_name())).unwrap()).unwrap();
    assert!(valid(&schema(PROFILE), &written));
    assert!(!valid(&schema(PROFILE), &Json::Null));
}

fn values() -> impl Strategy<Value = Json> {
    let leaf = prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::Bool),
        prop_oneof!["-?[0-9]", "[0-9]\\.[05]", Just("-0".into())].prop_map(Json::Number),
        "[a-c]{0,2}".prop_map(Json::Text),
        Just(Json::Object(Vec::new())),
        Just(Json::List(Vec::new())),
    ];
    let kind = prop_oneof![
        4 => prop::sample::select(PROFILE).prop_map(|kind| Json::text(kind.name)),
        1 => leaf.clone(),
    ];
    let fields: Vec<&str> = PROFILE.iter().flat_map(|kind| kind.fields).map(|field| field.name).collect();
    let name = prop::sample::select(fields).prop_map(str::to_owned);
    let version = prop::option::of(leaf.clone());
    (prop::option::of(kind), version, prop::collection::btree_map(name, leaf, 0..4)).prop_map(
        |(kind, version, rest)| {
            let mut members: Vec<_> = rest.into_iter().collect();
            members.extend(kind.map(|kind| ("kind".to_owned(), kind)));
            members.extend(version.map(|version| ("version".to_owned(), version)));
            Json::Object(members)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn the_reader_and_the_schema_agree_on_every_entry(value in values()) {
        let schema = schema(PROFILE);
        let verdict = judge(PROFILE, &value);
        prop_assert_eq!(valid(entries_rule(&schema), &value), !matches!(verdict, Verdict::Bad(_)), "{:?}", verdict);
    }
}
