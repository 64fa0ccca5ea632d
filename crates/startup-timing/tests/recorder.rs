//! The recorder as programs use it: threads, early returns, files, and a process that is killed.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};

use startup_timing::{PartState, Recorder, RecorderOptions, Report, Status, TimingError, read};

fn recorder(path: Option<&Path>) -> Recorder {
    Recorder::new(RecorderOptions { path: path.map(Into::into), ..RecorderOptions::default() }).unwrap()
}

/// The parent of the phase of that name, by name.
fn parent<'a>(report: &'a Report, name: &str) -> Option<&'a str> {
    let phase = report.phases.iter().find(|phase| phase.name == name).unwrap();
    phase.parent.map(|id| report.phases[id.0 as usize - 1].name.as_str())
}

#[test]
fn off_records_nothing_and_takes_everything() {
    let recorder = Recorder::off();
    let mut span = recorder.phase("a");
    span.count("bytes", 1);
    span.level("memory", None, Some(1));
    assert!(span.id().is_none() && span.phase("b").id().is_none());
    span.finish();
    assert!(!recorder.is_on() && recorder.report().is_none() && recorder.finish().is_none());
    recorder.note("x").unwrap();
}

#[test]
fn threads_get_the_parent_they_are_given() {
    let recorder = recorder(None);
    let load = recorder.phase("load");
    let id = load.id();
    std::thread::scope(|scope| {
        scope.spawn(|| load.phase("borrowed").finish());
        let recorder = &recorder;
        scope.spawn(move || recorder.phase_in("by number", id).finish());
        scope.spawn(|| recorder.phase("without").finish());
    });
    load.finish();
    let report = recorder.finish().unwrap();
    assert_eq!(parent(&report, "borrowed"), Some("load"));
    assert_eq!(parent(&report, "by number"), Some("load"));
    assert_eq!(parent(&report, "without"), None);
}

#[test]
fn a_phase_that_outlives_its_parent_moves_up() {
    let recorder = recorder(None);
    let outer = recorder.phase("outer");
    let inner = outer.phase("inner");
    let late = inner.phase("late");
    let inner_id = inner.id();
    inner.finish();
    let later = late.phase("later");
    late.finish();
    later.finish();
    recorder.phase_in("after", inner_id).finish();
    outer.finish();
    let report = recorder.finish().unwrap();
    for name in ["late", "later", "after"] {
        assert_eq!(parent(&report, name), Some("outer"), "{name}");
    }
    assert_eq!(report.phases.iter().filter(|phase| phase.outlived == inner_id).count(), 2);
}

#[test]
fn endings_say_what_became_of_a_phase() {
    let recorder = recorder(None);
    recorder.phase("well").finish();
    recorder.phase("badly").fail("OutOfMemory");
    drop(recorder.phase("dropped"));
    let error = recorder.phase("run").run(|_| "x".parse::<u8>()).unwrap_err();
    assert_eq!(error.to_string(), "invalid digit found in string");
    let moved = recorder.clone();
    let _ = std::thread::spawn(move || {
        let _span = moved.phase("panicked");
        panic!("as this test wants");
    })
    .join();
    let open = recorder.phase("open");
    let report = recorder.finish().unwrap();
    let endings: Vec<_> =
        report.phases.iter().map(|phase| (phase.status, phase.error_type.as_deref())).collect();
    assert_eq!(
        endings,
        [
            (Status::Success, None),
            (Status::Error, Some("OutOfMemory")),
            (Status::Error, Some("dropped")),
            (Status::Error, Some(std::any::type_name::<std::num::ParseIntError>())),
            (Status::Error, Some("panic")),
            (Status::Open, None),
        ]
    );
    assert_eq!(report.phases.last().unwrap().end(), report.duration);
    open.finish(); // too late, and nobody's concern
    assert_eq!(recorder.finish().unwrap().phases, report.phases);
}

#[test]
fn counters_are_of_the_phase_and_what_the_program_adds_counts_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data");
    std::fs::write(&path, vec![1; 4 << 20]).unwrap();
    let recorder = Recorder::new(RecorderOptions { counters: true, ..RecorderOptions::default() }).unwrap();
    let mut span = recorder.phase("read");
    let mut bytes = Vec::new();
    std::fs::File::open(&path).unwrap().read_to_end(&mut bytes).unwrap();
    span.count("tensors", 2);
    span.count("tensors", 3);
    span.level("device", Some(0), Some(5));
    span.finish();
    let phase = &recorder.finish().unwrap().phases[0];
    assert_eq!(phase.counters["tensors"], Some(5));
    assert_eq!(phase.levels["device"], (Some(0), Some(5)));
    // Other tests of this process read meanwhile; none of them 4 MiB.
    let read = phase.counters["io.rchar"].unwrap();
    assert!((4 << 20..6 << 20).contains(&read), "{read}");
}

#[test]
fn the_file_says_the_same_as_the_recorder() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let recorder = recorder(Some(&path));
    let outer = recorder.phase("outer");
    outer.phase("inner").fail("E");
    recorder.note("noted").unwrap();
    let facts = serde_json::json!({ "torch": "2.11" });
    recorder.environment(facts.as_object().unwrap().clone()).unwrap();
    let partial = read(&path).unwrap();
    assert!(!partial.complete && partial.processes[0].state == PartState::Partial);
    assert_eq!(partial.phases[0].status, Status::Open);
    outer.finish();
    assert_eq!(read(&path).unwrap().phases, recorder.report().unwrap().phases);
    let report = recorder.finish().unwrap();
    assert_eq!(read(&path).unwrap(), report);
}

#[test]
fn a_file_that_cannot_be_written_is_an_error_at_the_start_and_a_note_later() {
    let path = Path::new("/nowhere/at/all.jsonl");
    let options = RecorderOptions { path: Some(path.into()), ..RecorderOptions::default() };
    let error = Recorder::new(options).unwrap_err();
    assert!(matches!(error, TimingError::Io { act: "write", .. }), "{error}");
    // A device that is always full takes the opening and nothing else; the head is refused at once.
    let full = RecorderOptions { path: Some("/dev/full".into()), ..RecorderOptions::default() };
    assert!(matches!(Recorder::new(full).unwrap_err(), TimingError::Io { .. }));
}

const CHILD: &str = "STARTUP_TIMING_TEST_CHILD";

/// Not a test of its own: what the killed process of the test below does.
#[test]
#[expect(clippy::print_stdout, reason = "says that it is ready")]
fn child() {
    let Some(path) = std::env::var_os(CHILD) else { return };
    let recorder = recorder(Some(Path::new(&path)));
    recorder.phase("done").finish();
    let _open = recorder.phase("under way");
    println!("ready");
    std::thread::sleep(std::time::Duration::from_mins(10));
}

#[test]
fn a_killed_process_leaves_what_it_did() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("killed.jsonl");
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env(CHILD, &path).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut text = String::new();
    let mut out = child.stdout.take().unwrap();
    let mut byte = [0];
    while !text.contains("ready") && out.read(&mut byte).unwrap() == 1 {
        text.push(char::from(byte[0]));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let report = read(&path).unwrap();
    assert!(!report.complete);
    let phases: Vec<_> = report.phases.iter().map(|phase| (phase.name.as_str(), phase.status)).collect();
    assert_eq!(phases, [("done", Status::Success), ("under way", Status::Open)]);
}
