//! Whatever is in the folder: loading is no error, what can be used is used, and the rest is set aside with a reason.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::fs;
use std::path::Path;
use std::time::Duration;

use common::{entry, file, identity, observation};
use profile_store::folder::{Disk, Folder as _, LOCK};
use profile_store::{About, Identity, Json, LIMIT, Store, StoreError};

fn put(folder: &Path, bytes: impl AsRef<[u8]>) {
    fs::write(folder.join(identity().file_name()), bytes).unwrap();
}

fn names(folder: &Path, end: &str) -> Vec<String> {
    let names = Disk::new(folder).names().unwrap();
    names.into_iter().filter(|name| name.ends_with(end)).collect()
}

/// Loads bytes that are no record: they are aside, with their reason beside them, and a write begins anew.
fn is_set_aside(bytes: &[u8], reason: &str) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(folder.path());
    put(folder.path(), bytes);
    let loaded = store.load(&identity());
    assert!(loaded.record.is_none());
    let [notice] = &loaded.notices[..] else { panic!("{:?}", loaded.notices) };
    assert!(notice.reason.contains(reason), "{notice} does not say {reason:?}");
    let About::File { moved_to: Some(moved) } = &notice.about else { panic!("{notice:?}") };
    assert_eq!(fs::read(folder.path().join(moved)).unwrap(), bytes);
    let beside = fs::read_to_string(folder.path().join(format!("{moved}.reason"))).unwrap();
    assert!(beside.contains(reason), "{beside}");
    // Once only: now there is none.
    assert_eq!(store.load(&identity()).notices, []);

    // A writer that finds it does the same, and goes on.
    put(folder.path(), bytes);
    let (record, notices) = store.update(&identity(), |record| record.put("a", observation(1))).unwrap();
    assert!(notices[0].reason.contains(reason) && record.get("a").is_some());
    assert_eq!(store.load(&identity()).record.unwrap().names().collect::<Vec<_>>(), ["a"]);
    assert_eq!(names(folder.path(), ".bad").len(), 2);
}

#[test]
fn what_is_no_record_is_set_aside_with_its_reason() {
    let good = file("", "");
    is_set_aside(b"", "empty");
    is_set_aside(&[0; 4096], "zero bytes");
    is_set_aside(b"[]", "array, not an object");
    is_set_aside(b"null", "null, not an object");
    is_set_aside(b"3", "number, not an object");
    is_set_aside(b"{}", "no schema_version");
    is_set_aside(b"<!DOCTYPE html><html></html>", "a value should be here, at byte 0");
    is_set_aside(format!("{good} x").as_bytes(), "something follows");
    is_set_aside(&[b"[".repeat(10_000), b"]".repeat(10_000)].concat(), "too deep");
    is_set_aside(&[good.as_bytes(), b"\xff"].concat(), "not UTF-8");
    let utf16: Vec<u8> = [0xfeff].into_iter().chain(good.encode_utf16()).flat_map(u16::to_le_bytes).collect();
    is_set_aside(&utf16, "UTF-16");
    let utf16: Vec<u8> = [0xfeff].into_iter().chain(good.encode_utf16()).flat_map(u16::to_be_bytes).collect();
    is_set_aside(&utf16, "UTF-16");
    for version in ["0", "-1", "1.5", "0.0", "\"1\"", "null", "NaN", "1e999"] {
        let text = good.replace("\"schema_version\": 1", &format!("\"schema_version\": {version}"));
        is_set_aside(text.as_bytes(), "schema_version");
    }
    let other = Identity::named("another", "Model").unwrap();
    is_set_aside(good.replace(identity().key(), other.key()).as_bytes(), "another identity");
    is_set_aside(good.replace("video-5s", "video-6s").as_bytes(), "identity is damaged");
    is_set_aside(good.replace("\"entries\": {}", "\"entries\": []").as_bytes(), "no object of entries");
}

#[test]
fn every_cut_of_a_file_is_missing_or_whole() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(folder.path());
    store.update(&identity(), |record| record.put("größe", observation(7))).unwrap();
    let whole = fs::read(folder.path().join(identity().file_name())).unwrap();
    for length in 0..=whole.len() {
        put(folder.path(), &whole[..length]);
        let loaded = store.load(&identity());
        // The line feed at the end says nothing.
        assert_eq!(loaded.record.is_some(), length >= whole.len() - 1, "{length} of {} bytes", whole.len());
        assert_eq!(loaded.notices.is_empty(), loaded.record.is_some());
    }
}

#[test]
fn a_byte_order_mark_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    put(folder.path(), format!("\u{feff}{}", file(&format!("\"a\": {}", entry("\"peak_vram_gb\": 3")), "")));
    let loaded = Store::at(folder.path()).load(&identity());
    assert_eq!(loaded.notices, []);
    assert!(loaded.record.unwrap().get("a").is_some());
}

#[test]
fn a_huge_file_is_not_read() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(identity().file_name());
    fs::File::create(&path).unwrap().set_len(200 << 20).unwrap();
    let loaded = Store::at(folder.path()).load(&identity());
    assert!(loaded.record.is_none() && loaded.notices[0].reason.contains("209715200 bytes"));
    assert!(!path.exists());
}

#[test]
fn a_folder_in_the_files_place_is_set_aside_too() {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join(identity().file_name())).unwrap();
    let store = Store::at(folder.path());
    assert!(store.load(&identity()).notices[0].reason.contains("no file"));
    store.update(&identity(), |record| record.put("a", observation(1))).unwrap();
}

#[test]
fn a_bad_entry_costs_only_itself() {
    let bad = [
        ("\"peak_vram_gb\": \"3\"", "string, not number"),
        ("\"peak_vram_gb\": NaN", "NaN"),
        ("\"peak_vram_gb\": Infinity", "Infinity"),
        ("\"measurement\": {\"x\": [-Infinity]}", "Infinity"),
        ("\"peak_vram_gb\": 1e999", "1e999"),
        ("\"peak_vram_gb\": -1", "below 0"),
        ("\"sequence\": -4096", "no whole number"),
        ("\"sequence\": 1.5", "no whole number"),
        ("\"peak_vram_gb\": 1, \"peak_vram_gb\": 2", "twice"),
        ("\"note\": \"\\ud800\"", "surrogate"),
        ("\"\\udc00\": 1", "surrogate"),
        ("\"version\": \"1\"", "version"),
        ("\"kind\": 3", "twice"),
    ];
    for (field, reason) in bad {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::at(folder.path());
        let text = file(&format!("\"bad\": {}, \"good\": {}", entry(field), entry("\"x\": 1")), "");
        put(folder.path(), &text);
        let loaded = store.load(&identity());
        let record = loaded.record.unwrap();
        assert!(record.get("good").is_some() && record.get("bad").is_none(), "{field}");
        let [notice] = &loaded.notices[..] else { panic!("{:?}", loaded.notices) };
        assert_eq!(notice.about, About::Entry { name: "bad".into() });
        assert!(notice.reason.contains(reason), "{field}: {notice}");
        // A load changes nothing; the next write keeps the bad entry as a text, and its file is JSON for everyone.
        assert_eq!(fs::read_to_string(folder.path().join(identity().file_name())).unwrap(), text);
        store.update(&identity(), |record| record.put("new", observation(1))).unwrap();
        let written = fs::read(folder.path().join(identity().file_name())).unwrap();
        let root = Json::parse(&written).unwrap();
        assert_eq!(root.flaw(), None);
        let aside = root.get("set_aside").and_then(|aside| aside.get("bad")).unwrap();
        assert!(aside.get("reason").and_then(Json::as_text).unwrap().contains(reason));
        assert!(aside.get("text").and_then(Json::as_text).unwrap().contains("observation"));
        let loaded = store.load(&identity());
        assert_eq!(loaded.notices, []);
        assert_eq!(loaded.record.unwrap().names().collect::<Vec<_>>(), ["good", "new"]);
    }
    for (entry, reason) in [("3", "number, not object"), ("{}", "no kind"), ("{\"kind\": 4}", "kind")] {
        let folder = tempfile::tempdir().unwrap();
        put(folder.path(), file(&format!("\"bad\": {entry}"), ""));
        let notices = Store::at(folder.path()).load(&identity()).notices;
        assert!(notices[0].reason.contains(reason), "{notices:?}");
    }
}

#[test]
fn the_last_of_two_entries_of_one_name_counts() {
    let folder = tempfile::tempdir().unwrap();
    let (first, last) = (entry("\"peak_vram_gb\": 1"), entry("\"peak_vram_gb\": 2"));
    put(folder.path(), file(&format!("\"a\": {first}, \"a\": {last}"), ""));
    let loaded = Store::at(folder.path()).load(&identity());
    assert!(loaded.notices[0].reason.contains("twice"));
    let record = loaded.record.unwrap();
    assert_eq!(record.get("a").and_then(|entry| entry.get("peak_vram_gb")), Some(&Json::Number("2".into())));
}

#[test]
fn what_is_not_known_stays() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(folder.path());
    let entries = format!(
        "\"new-kind\": {{\"kind\": \"pinning\", \"x\": 1e999}}, \"newer\": {{\"kind\": \"observation\", \"version\": 7}}, \"a\": {}",
        entry("\"remark\": 1.50")
    );
    put(folder.path(), file(&entries, ", \"tool\": {\"of\": [1, 2.50]}, \"bad\": [NaN]"));
    store.update(&identity(), |record| record.put("a", observation(9))).unwrap();
    let loaded = store.load(&identity());
    assert_eq!(loaded.notices, []);
    let text = fs::read_to_string(folder.path().join(identity().file_name())).unwrap();
    let root = Json::parse(text.as_bytes()).unwrap();
    let entries = root.get("entries").unwrap();
    assert_eq!(entries.get("new-kind").unwrap().canonical(), "{\"kind\":\"pinning\",\"x\":1e999}");
    assert_eq!(entries.get("newer").unwrap().canonical(), "{\"kind\":\"observation\",\"version\":7}");
    assert_eq!(entries.get("a").unwrap().get("remark"), Some(&Json::Number("1.50".into())));
    assert_eq!(root.get("tool").unwrap().canonical(), "{\"of\":[1,2.50]}");
    assert!(root.get("set_aside").unwrap().get("/bad").is_some());
    // A newer program's entry is neither understood nor replaced.
    let record = loaded.record.unwrap();
    assert!(record.get("newer").is_none() && record.names().any(|name| name == "newer"));
    let refused = store.update(&identity(), |record| record.put("newer", observation(1))).unwrap_err();
    assert!(refused.to_string().contains("newer program"), "{refused}");
}

#[test]
fn a_newer_version_is_read_as_far_as_it_is_understood_and_never_lost() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(folder.path());
    let newer = file(&format!("\"a\": {}", entry("\"peak_vram_gb\": 1")), ", \"shape\": 9")
        .replace("\"schema_version\": 1", "\"schema_version\": 999");
    put(folder.path(), &newer);
    let loaded = store.load(&identity());
    assert_eq!(loaded.notices[0].about, About::Version { version: 999 });
    assert!(loaded.record.unwrap().get("a").is_some());
    store.update(&identity(), |record| record.put("b", observation(2))).unwrap();
    let root = Json::parse(&fs::read(folder.path().join(identity().file_name())).unwrap()).unwrap();
    assert_eq!(
        (root.get("schema_version").unwrap().as_u64(), root.get("shape").unwrap().as_u64()),
        (Some(999), Some(9))
    );

    // In a shape that is not known, it is left as it is.
    let other = newer.replace("\"entries\": {", "\"entries\": 4, \"content\": {");
    put(folder.path(), &other);
    let loaded = store.load(&identity());
    assert!(loaded.record.is_none() && loaded.notices[0].to_string().contains("999"));
    let refused = store.update(&identity(), |record| record.put("b", observation(2))).unwrap_err();
    assert!(matches!(refused, StoreError::Newer { version: 999, .. }));
    assert_eq!(fs::read_to_string(folder.path().join(identity().file_name())).unwrap(), other);
}

#[test]
fn a_lock_that_another_holds_times_out_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(folder.path());
    store.update(&identity(), |record| record.put("a", observation(1))).unwrap();
    let before = fs::read(folder.path().join(identity().file_name())).unwrap();
    let lock = Disk::new(folder.path()).lock(Duration::ZERO).unwrap().unwrap();
    let waiting = store.clone().waiting(Duration::from_millis(20));
    let refused = waiting.update(&identity(), |record| record.put("b", observation(2))).unwrap_err();
    assert!(matches!(refused, StoreError::Locked { .. }), "{refused}");
    assert!(store.load(&identity()).record.is_some(), "readers take no lock");
    put(folder.path(), "{");
    let loaded = store.load(&identity());
    assert_eq!(loaded.notices[0].about, About::File { moved_to: None }, "set aside by the next writer");
    put(folder.path(), &before);
    drop(lock);
    waiting.update(&identity(), |record| record.put("b", observation(2))).unwrap();
    assert!(folder.path().join(LOCK).exists());
}

#[test]
fn a_change_that_fails_or_panics_leaves_the_file_and_no_lock() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::at(folder.path()).waiting(Duration::from_secs(1));
    store.update(&identity(), |record| record.put("a", observation(1))).unwrap();
    let before = fs::read(folder.path().join(identity().file_name())).unwrap();
    let negative =
        Json::object([("kind", Json::text("capacity")), ("max_success", Json::Number("-1".into()))]);
    let refused = store.update(&identity(), |record| record.put("b", negative)).unwrap_err();
    assert!(refused.to_string().contains("below 0"), "{refused}");
    let panicked = std::panic::catch_unwind(|| store.update(&identity(), |_| panic!("on purpose")));
    assert!(panicked.is_err());
    let large =
        Json::object([("kind", Json::text("capacity")), ("x", Json::text("x".repeat(LIMIT as usize)))]);
    let refused = store.update(&identity(), |record| record.put("b", large)).unwrap_err();
    assert!(matches!(refused, StoreError::TooLarge { .. }), "{refused}");
    assert_eq!(fs::read(folder.path().join(identity().file_name())).unwrap(), before);
    store.update(&identity(), |record| record.put("b", observation(2))).unwrap();
    assert_eq!(names(folder.path(), ".tmp"), [""; 0]);
}

#[test]
fn identities_that_no_file_can_stand_for_are_refused() {
    for refused in [
        Identity::named(" ", "Model"),
        Identity::named("name", ""),
        Identity::of(Json::Null),
        Identity::of(Json::object::<&str>([])),
        Identity::of(Json::object([("a", Json::Null), ("a", Json::Null)])),
    ] {
        assert!(matches!(refused, Err(StoreError::Refused { .. })));
    }
    // Python's sha256(json.dumps({"name": "größe 𝄞", "model_class": "M"}, sort_keys=True, separators=(",", ":"))).
    let identity = Identity::named("größe 𝄞\u{7f}", "M").unwrap();
    assert_eq!(
        identity.value().canonical(),
        "{\"model_class\":\"M\",\"name\":\"gr\\u00f6\\u00dfe \\ud834\\udd1e\\u007f\"}"
    );
}
