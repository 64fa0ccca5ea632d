//! Random histories of writes, removals, foreign fields and damage, beside a model that knows nothing of files.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use common::{identity, observation};
use profile_store::{Identity, Json, Store};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Act {
    Put(String, u32),
    Remove(String),
    /// Another program adds a field at the top and an entry of a kind of its own.
    Foreign(String),
    /// An entry is replaced by something that is none.
    Damage(String),
    /// The file loses its end.
    Cut(usize),
    /// An update that fails.
    Fail(String),
}

fn acts() -> impl Strategy<Value = Act> {
    let name = "[a-dé\"\\\\]{1,2}";
    prop_oneof![
        4 => (name, 0..1000_u32).prop_map(|(name, value)| Act::Put(name, value)),
        1 => name.prop_map(Act::Remove),
        1 => name.prop_map(Act::Foreign),
        1 => name.prop_map(Act::Damage),
        1 => (0..60_usize).prop_map(Act::Cut),
        1 => name.prop_map(Act::Fail),
    ]
}

/// A member of the root's object `entries`, in place of what has its name.
fn replace(members: &mut Vec<(String, Json)>, name: &str, value: Json) {
    members.retain(|(own, _)| own != name);
    members.push((name.to_owned(), value));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn a_store_is_a_map_that_survives_files(acts in prop::collection::vec(acts(), 1..24)) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(identity().file_name());
        let store = Store::at(folder.path());
        let mut model: BTreeMap<String, u32> = BTreeMap::new();
        let mut foreign: BTreeSet<String> = BTreeSet::new();
        for act in acts {
            match act {
                Act::Put(name, value) => {
                    let put = store.update(&identity(), |record| record.put(&name, observation(value)));
                    // What another program wrote under that name is not ours to replace.
                    prop_assert_eq!(put.is_err(), foreign.contains(&name));
                    if put.is_ok() {
                        model.insert(name, value);
                    }
                }
                Act::Remove(name) => {
                    store.update(&identity(), |record| { record.remove(&name); Ok(()) }).unwrap();
                    model.remove(&name);
                }
                Act::Fail(name) => {
                    let before = fs::read(&path).ok();
                    let failed = store.update(&identity(), |record| {
                        record.put(&name, observation(1))?;
                        record.put(&name, Json::Null)
                    });
                    prop_assert!(failed.is_err());
                    prop_assert_eq!(fs::read(&path).ok(), before);
                }
                Act::Foreign(name) | Act::Damage(name) if !path.exists() => drop(name),
                Act::Foreign(name) => {
                    let Json::Object(mut root) = Json::parse(&fs::read(&path).unwrap()).unwrap() else { panic!() };
                    replace(&mut root, "foreign", Json::text(name.as_str()));
                    let entries = root.iter_mut().find(|(own, _)| own == "entries").unwrap();
                    let Json::Object(entries) = &mut entries.1 else { panic!() };
                    replace(entries, &name, Json::object([("kind", Json::text("theirs")), ("name", Json::text(name.as_str()))]));
                    fs::write(&path, Json::Object(root).pretty()).unwrap();
                    model.remove(&name);
                    foreign.insert(name);
                }
                Act::Damage(name) => {
                    let Json::Object(mut root) = Json::parse(&fs::read(&path).unwrap()).unwrap() else { panic!() };
                    let entries = root.iter_mut().find(|(own, _)| own == "entries").unwrap();
                    let Json::Object(entries) = &mut entries.1 else { panic!() };
                    replace(entries, &name, Json::text("damage"));
                    fs::write(&path, Json::Object(root).pretty()).unwrap();
                    model.remove(&name);
                    foreign.remove(&name);
                }
                Act::Cut(bytes) => {
                    if let Ok(mut text) = fs::read(&path) {
                        let kept = text.len().saturating_sub(bytes + 2);
                        text.truncate(kept);
                        fs::write(&path, text).unwrap();
                        model.clear();
                        foreign.clear();
                    }
                }
            }
            let loaded = store.load(&identity());
            let record = loaded.record;
            let read: BTreeMap<String, u32> = record.iter().flat_map(|record| {
                record.of_kind("observation").map(|(name, entry)| {
                    (name.to_owned(), entry.get("peak_vram_gb").and_then(Json::as_u64).unwrap() as u32)
                }).collect::<Vec<_>>()
            }).collect();
            prop_assert_eq!(&read, &model);
            let theirs = record.iter().flat_map(|record| record.names().filter(|name| record.get(name).is_none()));
            prop_assert_eq!(theirs.collect::<Vec<_>>(), foreign.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_is_written_is_read_and_spelled_the_same(text in "\\PC{0,12}", number in any::<f64>(), raw in prop::collection::vec(any::<char>(), 0..8)) {
        let raw: String = raw.into_iter().collect();
        let value = Json::object([
            ("text", Json::text(text.as_str())), ("raw", Json::text(raw)), ("number", Json::number(number).unwrap_or(Json::Null)),
            ("list", Json::List(vec![Json::Bool(true), Json::List(Vec::new()), Json::Object(Vec::new())])),
        ]);
        let read = Json::parse(value.pretty().as_bytes()).unwrap();
        prop_assert_eq!(read.canonical(), value.canonical());
        prop_assert_eq!(Json::parse(value.canonical().as_bytes()).unwrap().canonical(), value.canonical());
        prop_assert!(value.canonical().is_ascii());
        if number.is_finite() {
            prop_assert_eq!(read.get("number").and_then(Json::as_f64), Some(number));
        }
    }

    #[test]
    fn the_members_order_changes_no_identity(names in prop::collection::btree_set("[a-z]{1,3}", 1..5), seed in any::<u64>()) {
        let mut members: Vec<_> = names.into_iter().map(|name| (name.clone(), Json::Text(name))).collect();
        let one = Identity::of(Json::Object(members.clone())).unwrap();
        let turn = seed as usize % members.len();
        members.rotate_left(turn);
        members.reverse();
        let other = Identity::of(Json::Object(members)).unwrap();
        prop_assert_eq!(one.key(), other.key());
    }
}
