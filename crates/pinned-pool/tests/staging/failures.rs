//! Files that are cut, changed or unreadable, and driver calls that fail: a typed error for the job it happened to, and a
//! ring that goes on.

use std::fs::File;
use std::sync::Arc;

use gpu_driver::{Bytes, CopyOrder, Verb};
use pinned_pool::{FileBytes, HostError, LineRun, SourceFile, StagingOptions};

use super::rig::{Model, Place, Rig, Rng, device, small_ring};

fn is_injected(error: &HostError) -> bool {
    error.to_string().contains("was made to fail")
}

#[test]
fn a_file_cut_short_is_an_error_that_names_it_and_the_ring_goes_on() {
    for uncached in [false, true] {
        let (_host, device) = device(CopyOrder::Random, 1);
        let mut rng = Rng::new(1);
        let sizes = [(200_000, Place::File), (200_000, Place::File), (50_000, Place::Memory)];
        let rig = Rig::new(&device, Model::new(&device, &mut rng, &sizes), &small_ring(), uncached).unwrap();
        let other = Model::new(&device, &mut rng, &[(300_000, Place::File)]);
        let other = Rig::new(&device, other, &small_ring(), uncached).unwrap();
        assert!(rig.run().unwrap() && other.run().unwrap());
        let file = rig.model.file.as_file();
        let whole = std::fs::read(rig.model.file.path()).unwrap();
        let written = file.metadata().unwrap().modified().unwrap();
        file.set_len(100_000).unwrap();
        let error = rig.run().unwrap_err();
        let HostError::Unread { cause, .. } = &error else { panic!("{error}") };
        assert!(matches!(**cause, HostError::FileChanged { .. }), "{error}");
        assert!(error.to_string().contains(&rig.model.file.path().display().to_string()), "{error}");
        // The other model is not concerned.
        assert!(other.run().unwrap());
        // Once the file is as it was, so is everything.
        std::fs::write(rig.model.file.path(), whole).unwrap();
        file.set_modified(written).unwrap();
        assert!(rig.run().unwrap());
        rig.close().unwrap();
        other.close().unwrap();
    }
}

#[test]
fn what_the_system_cannot_read_names_the_place_on_the_line() {
    let (_host, device) = device(CopyOrder::Eager, 2);
    let mut rng = Rng::new(2);
    let mut model = Model::new(&device, &mut rng, &[(1000, Place::Memory), (9000, Place::Memory)]);
    // A folder opens like a file and cannot be read.
    let folder = tempfile::tempdir().unwrap();
    let source = SourceFile::new(Arc::new(File::open(folder.path()).unwrap()), folder.path()).unwrap();
    let size = source.size();
    let offset = model.runs[1].offset();
    let bytes = FileBytes::new(&source, 0, Bytes(size.0.min(40))).unwrap().into();
    model.runs[1] = LineRun::Staged { offset, bytes };
    let rig = Rig::new(&device, model, &small_ring(), false).unwrap();
    for _ in 0..2 {
        let error = rig.run().unwrap_err();
        let HostError::Unread { offset: found, cause } = &error else { panic!("{error}") };
        assert_eq!(*found, offset);
        assert!(matches!(**cause, HostError::FileRead { offset: 0, .. }), "{error}");
    }
    rig.close().unwrap();
}

/// Start, three jobs, the end: each call of each verb fails once.
#[test]
fn any_driver_call_may_fail_once() {
    let run = |fault: Option<(Verb, u64)>| -> Vec<(Verb, u64)> {
        let (host, device) = device(CopyOrder::Random, 3);
        let mut rng = Rng::new(3);
        let sizes = [(150_000, Place::Memory), (90_000, Place::Locked), (120_000, Place::File)];
        let model = Model::new(&device, &mut rng, &sizes);
        device.reset();
        if let Some((verb, index)) = fault {
            device.fail(verb, index);
        }
        let rig = match Rig::new(&device, model, &small_ring(), false) {
            Ok(rig) => rig,
            Err(error) => {
                assert!(is_injected(&error), "{error}");
                drop(device);
                assert!(host.counters().nothing_alive(), "{fault:?}: {:?}", host.counters());
                return Vec::new();
            }
        };
        for _ in 0..3 {
            let ran = match rig.run() {
                Err(error) if is_injected(&error) => {
                    // What failed may have been a wait, on which later jobs would rely.
                    rig.line.cancel().unwrap();
                    if rig.stream.drain().is_err() {
                        rig.stream.drain().unwrap();
                    }
                    rig.run()
                }
                other => other,
            };
            assert!(ran.unwrap(), "{fault:?}");
        }
        let calls = Verb::ALL.iter().map(|&verb| (verb, device.calls(verb))).collect();
        let mut rig = rig;
        if let Err(error) = rig.line.close() {
            assert!(is_injected(&error), "{error}");
            rig.line.close().unwrap();
        }
        device.reset();
        rig.stream.drain().unwrap();
        drop((rig, device));
        assert!(host.counters().nothing_alive(), "{fault:?}: {:?}", host.counters());
        calls
    };
    let mut faults = 0;
    for (verb, calls) in run(None) {
        for index in 0..calls.min(40) {
            run(Some((verb, index)));
            faults += 1;
        }
    }
    assert!(faults > 60, "only {faults} calls failed");
}

/// A device whose marks cannot be told any more: jobs fail, nobody waits for ever, and the memory is not given back.
#[test]
fn a_device_that_is_gone_fails_every_job_and_hangs_nobody() {
    let (_host, device) = device(CopyOrder::Lazy, 4);
    let mut rng = Rng::new(4);
    let model = Model::new(&device, &mut rng, &[(600_000, Place::Memory)]);
    let rig = Rig::new(&device, model, &small_ring(), false).unwrap();
    assert!(rig.run().unwrap());
    for verb in [Verb::RecordEvent, Verb::SynchronizeStream, Verb::QueryEvent] {
        let now = device.calls(verb);
        (now..now + 200).for_each(|index| device.fail(verb, index));
    }
    for _ in 0..8 {
        assert!(rig.run().is_err());
        rig.line.cancel().unwrap();
    }
    device.reset();
    rig.stream.drain().unwrap();
    // A new ring can be had once the old one's last user has gone.
    rig.close().unwrap();
    let model = Model::new(&device, &mut rng, &[(600_000, Place::Memory)]);
    let rig = Rig::new(&device, model, &small_ring(), false).unwrap();
    assert!(rig.run().unwrap());
    rig.close().unwrap();
}

#[test]
fn a_refused_lock_makes_the_ring_smaller_and_then_pageable_and_says_so() {
    let (_host, device) = device(CopyOrder::Random, 5);
    let mut rng = Rng::new(5);
    let sizes = [(400_000, Place::Memory), (100_000, Place::File)];
    let model = Model::new(&device, &mut rng, &sizes);
    device.reset();
    device.fail(Verb::RegisterHost, 0);
    let rig = Rig::new(&device, model, &small_ring(), false).unwrap();
    let report = rig.line.report();
    assert_eq!((report.locked, report.chunks), (Bytes::kib(128), 2));
    assert!(report.step_down.unwrap().contains("page-locked"));
    assert!(rig.run().unwrap());
    rig.close().unwrap();

    let never = StagingOptions { register_limit: Some(Bytes::ZERO), ..small_ring() };
    let model = Model::new(&device, &mut rng, &sizes);
    let rig = Rig::new(&device, model, &never, false).unwrap();
    let report = rig.line.report();
    assert_eq!((report.locked, report.chunks), (Bytes::ZERO, 4));
    assert!(report.step_down.unwrap().contains("pageable"));
    assert!(rig.run().unwrap());
    rig.close().unwrap();

    let only = StagingOptions { locked_only: true, ..never };
    let model = Model::new(&device, &mut rng, &sizes);
    assert!(matches!(Rig::new(&device, model, &only, false), Err(HostError::RegisterLimit { .. })));
}
