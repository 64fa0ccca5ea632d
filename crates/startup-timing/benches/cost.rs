//! What a phase costs: while nothing is recorded, recorded in memory, with the system's counters, and written to a file.
#![expect(clippy::expect_used, reason = "a benchmark of fixed input")]
#![allow(missing_docs, reason = "criterion's macros make public items")]

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use startup_timing::{Recorder, RecorderOptions, chrome_trace, read_bytes, to_json};

/// Phases of one recording before the next begins: a start has tens.
const PHASES: u64 = 200;

fn phases(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("recording.jsonl");
    let off = Recorder::off();
    criterion.bench_function("a phase, off", |bencher| bencher.iter(|| off.phase("vae.construct").finish()));
    let kinds = [
        ("a phase, in memory", RecorderOptions::default()),
        ("a phase, counters", RecorderOptions { counters: true, ..RecorderOptions::default() }),
        ("a phase, file", RecorderOptions { path: Some(path.clone()), ..RecorderOptions::default() }),
        (
            "a phase, counters and file",
            RecorderOptions { path: Some(path.clone()), counters: true, ..RecorderOptions::default() },
        ),
    ];
    for (name, options) in kinds {
        criterion.bench_function(name, |bencher| {
            bencher.iter_custom(|count| {
                let mut taken = std::time::Duration::ZERO;
                let mut left = count;
                while left > 0 {
                    let recorder = Recorder::new(options.clone()).expect("the folder is there");
                    let parent = recorder.phase("component.vae");
                    let some = left.min(PHASES);
                    let start = std::time::Instant::now();
                    for _ in 0..some {
                        parent.phase("vae.construct").finish();
                    }
                    taken += start.elapsed();
                    left -= some;
                }
                taken
            });
        });
    }
}

fn reports(criterion: &mut Criterion) {
    let recorder =
        Recorder::new(RecorderOptions { counters: true, ..RecorderOptions::default() }).expect("no file");
    let parent = recorder.phase("component.vae");
    for _ in 0..PHASES {
        parent.phase("vae.construct").finish();
    }
    parent.finish();
    let report = recorder.finish().expect("it is on");
    let json = to_json(&report).expect("it is sound");
    criterion.bench_function("200 phases to JSON", |bencher| bencher.iter(|| to_json(&report)));
    criterion.bench_function("200 phases to a trace", |bencher| bencher.iter(|| chrome_trace(&report)));
    criterion.bench_function("200 phases from JSON", |bencher| {
        bencher.iter_batched(|| json.as_bytes(), |bytes| read_bytes(bytes, "bench"), BatchSize::SmallInput);
    });
}

criterion_group!(benches, phases, reports);
criterion_main!(benches);
