//! Files that are no reports, or contradict themselves: each is refused by name.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use serde_json::{Value, json};
use startup_timing::{MAX_FILE_BYTES, TimingError, read, read_bytes, to_json};

fn report() -> Value {
    let report = common::report(&[(None, "a", 0, 10_000_000), (Some(0), "b", 2_000_000, 3_000_000)]);
    serde_json::from_str(&to_json(&report).unwrap()).unwrap()
}

fn refused(value: &Value) -> String {
    let error = read_bytes(value.to_string().as_bytes(), "x.json").unwrap_err();
    assert!(matches!(error, TimingError::Foreign { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn what_is_no_report_is_refused_with_a_reason() {
    for text in ["", " \n", "{", "[]", "1", "null", "\"x\"", "{}", "no json", "{\"schema\": 5}", "\u{feff}{}"]
    {
        let error = read_bytes(text.as_bytes(), "x.json").unwrap_err();
        let shown = error.to_string();
        assert!(shown.starts_with("x.json is not a report of startup timings: "), "{text:?}: {shown}");
    }
    assert!(refused(&json!({ "traceEvents": [] })).contains("its schema is"));
    assert!(read_bytes(b"\xff\xfe\n{}", "x").unwrap_err().to_string().contains("not UTF-8"));
}

#[test]
fn a_newer_schema_is_refused_as_such() {
    let mut report = report();
    report["schema_version"] = 2.into();
    let error = read_bytes(report.to_string().as_bytes(), "x.json").unwrap_err();
    assert_eq!(error.to_string(), "x.json has schema version 2; this version reads 1");
}

#[test]
fn a_report_that_contradicts_itself_is_refused() {
    let sound = report();
    assert!(read_bytes(sound.to_string().as_bytes(), "x").is_ok());
    let pretty = serde_json::to_string_pretty(&sound).unwrap();
    assert!(read_bytes(pretty.as_bytes(), "x").is_ok());
    let mut changes: Vec<(&str, &str, Value, &str)> = vec![
        ("phases", "id", 1.into(), "stands at place 2"),
        ("phases", "parent_id", 2.into(), "before its parent"),
        ("phases", "parent_id", 9.into(), "before its parent"),
        ("phases", "start_offset", 1.into(), "does not lie inside"),
        ("phases", "duration", (-1).into(), "a duration is -1"),
        ("phases", "duration", 1e300.into(), "a duration is"),
        ("phases", "duration", Value::Null, "invalid type"),
        ("phases", "status", "fine".into(), "unknown variant"),
        ("phases", "process", 1.into(), "has no process"),
        ("phases", "name", "x".repeat(257).into(), "is longer than"),
        ("phases", "counters", json!({ "a": "b" }), "invalid type"),
    ];
    changes.push(("phases", "levels", json!({ "a": [1] }), "invalid length"));
    for (list, field, value, why) in changes {
        let mut report = sound.clone();
        report[list][1][field] = value;
        let said = refused(&report);
        assert!(said.contains(why), "{field}: {said}");
    }
}

#[test]
fn a_recording_with_a_wrong_line_names_it() {
    let good = common::file(&[]);
    for (line, why) in [
        ("{\"event\":\"end\",\"id\":1,\"at\":5,\"status\":\"success\"}", "there is no phase 1"),
        ("{\"event\":\"begin\",\"id\":2,\"name\":\"a\",\"at\":5}", "there is no phase 2"),
        (
            "{\"event\":\"begin\",\"id\":1,\"name\":\"a\",\"at\":18446744073709551615}",
            "is no time of a start",
        ),
        ("{\"event\":\"dance\"}", "unknown variant"),
        ("{", "EOF"),
    ] {
        let error = read_bytes(format!("{good}{line}\n").as_bytes(), "x").unwrap_err().to_string();
        assert!(error.contains("line 2: ") && error.contains(why), "{error}");
    }
}

#[test]
fn files_that_are_missing_or_too_large_are_errors_of_their_own() {
    let error = read(std::path::Path::new("/nowhere.json")).unwrap_err();
    assert!(matches!(error, TimingError::Io { act: "read", .. }), "{error}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("large");
    std::fs::File::create(&path).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
    assert!(matches!(read(&path).unwrap_err(), TimingError::TooLarge { .. }));
    assert!(matches!(read(folder.path()).unwrap_err(), TimingError::Io { .. }));
}
