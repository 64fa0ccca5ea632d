//! What is typical of runs, and what is beyond their noise.
#![allow(clippy::unwrap_used, clippy::float_cmp, reason = "tests")]

mod common;

use startup_timing::{Report, RunSet, Status, TimingError, diff, stats};

/// Numbers without order, the same in every run of the tests.
struct Noise(u64);

impl Noise {
    /// About normal, with mean 0 and deviation 1.
    fn next(&mut self) -> f64 {
        let mut sum = 0.0;
        for _ in 0..12 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += (self.0 >> 11) as f64 / (1_u64 << 53) as f64;
        }
        sum - 6.0
    }
}

/// A start of twenty phases of 100 ms, which vary by 3 %; one of them is slower by a factor.
fn start(noise: &mut Noise, slow: Option<(usize, f64)>) -> Report {
    let mut phases: Vec<(Option<usize>, &str, u64, u64)> = vec![(None, "pipeline.create", 0, 0)];
    let names: Vec<String> = (0..20).map(|number| format!("phase {number}")).collect();
    let mut at = 0;
    for (number, name) in names.iter().enumerate() {
        let factor = slow.filter(|slow| slow.0 == number).map_or(1.0, |slow| slow.1);
        #[expect(clippy::cast_sign_loss, reason = "far from 0")]
        let taken = (1e8 * factor * (1.0 + 0.03 * noise.next())) as u64;
        phases.push((Some(0), name, at, taken));
        at += taken;
    }
    phases[0].3 = at + 1_000_000;
    common::report(&phases)
}

fn runs(noise: &mut Noise, count: usize, slow: Option<(usize, f64)>) -> RunSet {
    let mut set = RunSet::new();
    for _ in 0..count {
        set.add(&start(noise, slow)).unwrap();
    }
    set
}

#[test]
fn a_slower_phase_is_flagged_and_nothing_else() {
    let mut noise = Noise(1);
    let (before, after) = (runs(&mut noise, 8, None), runs(&mut noise, 8, Some((7, 1.2))));
    let found = diff(&before, &after, 0.99, 0.05).unwrap();
    let flagged: Vec<_> = found.differences.iter().filter(|one| one.flagged).collect();
    assert_eq!(flagged.len(), 1, "{flagged:?}");
    assert_eq!(flagged[0].path, "pipeline.create / phase 7");
    let change = flagged[0].change.unwrap();
    assert!((0.15..0.25).contains(&change), "{change}");
    let shown = found.table().to_string();
    assert!(shown.contains("SLOWER  pipeline.create / phase 7"), "{shown}");
}

#[test]
fn runs_of_the_same_thing_differ_by_noise_only() {
    let mut noise = Noise(2);
    let mut false_flags = 0;
    for _ in 0..100 {
        let found = diff(&runs(&mut noise, 5, None), &runs(&mut noise, 5, None), 0.99, 0.0).unwrap();
        false_flags += u32::from(found.differences.iter().any(|one| one.flagged));
    }
    // One in a hundred is what the confidence allows; 5 is above it with a chance of 1 in 300.
    assert!(false_flags < 5, "{false_flags}");
}

#[test]
fn of_single_runs_nothing_is_flagged_and_no_interval_is_given() {
    let mut noise = Noise(3);
    let (before, after) = (runs(&mut noise, 1, None), runs(&mut noise, 1, Some((0, 3.0))));
    let found = diff(&before, &after, 0.99, 0.05).unwrap();
    assert!(!found.noise_known && found.differences.iter().all(|one| !one.flagged && one.chance.is_none()));
    assert!(found.table().to_string().contains("noise is not known"));
    let distributions = stats(&before, 0.95).unwrap();
    assert!(distributions.iter().all(|one| one.interval.is_none() && one.runs == 1));
    assert!(!before.table(&distributions, 0.95).to_string().contains(" to "));
}

#[test]
fn medians_quantiles_and_intervals_are_those_of_textbooks() {
    let mut set = RunSet::new();
    for taken in [10, 30, 20, 50, 40] {
        set.add(&common::report(&[(None, "load", 0, taken * 1_000_000_000)])).unwrap();
    }
    let load = stats(&set, 0.95).unwrap().into_iter().find(|one| one.path == "load").unwrap();
    assert_eq!((load.median, load.runs, load.exclusive), (30.0, 5, 30.0));
    assert!((load.p90 - 46.0).abs() < 1e-9);
    // Mean 30, deviation √250, t(0.975, 4) = 2.7764.
    let (from, to) = load.interval.unwrap();
    assert!((from - 10.367).abs() < 1e-3 && (to - 49.633).abs() < 1e-3, "{from} {to}");
}

#[test]
fn failed_and_unfinished_runs_are_left_out_and_counted() {
    let mut noise = Noise(4);
    let mut set = runs(&mut noise, 3, None);
    let mut failed = start(&mut noise, None);
    failed.phases[0].status = Status::Error;
    set.add(&failed).unwrap();
    let mut partial = start(&mut noise, None);
    partial.complete = false;
    set.add(&partial).unwrap();
    assert_eq!((set.runs(), set.failed()), (3, 2));
    let shown = set.table(&stats(&set, 0.95).unwrap(), 0.95).to_string();
    assert!(shown.contains("2 runs failed or did not end"), "{shown}");
    let mut none = RunSet::new();
    none.add(&partial).unwrap();
    assert!(matches!(stats(&none, 0.95), Err(TimingError::Nothing(_))));
    assert!(matches!(diff(&set, &none, 0.99, 0.0), Err(TimingError::Nothing(_))));
}

#[test]
fn phases_of_one_path_are_added_up_and_those_of_one_side_only_are_shown() {
    let (mut before, mut after) = (RunSet::new(), RunSet::new());
    before.add(&common::report(&[(None, "read", 0, 5), (None, "read", 5, 7), (None, "old", 12, 1)])).unwrap();
    after.add(&common::report(&[(None, "read", 0, 12), (None, "new", 12, 1)])).unwrap();
    let found = diff(&before, &after, 0.95, 0.0).unwrap();
    let of = |path: &str| found.differences.iter().find(|one| one.path == path).unwrap();
    assert_eq!(of("read").change, Some(0.0));
    assert_eq!((of("old").after, of("new").before, of("new").change), (None, None, None));
}

#[test]
fn settings_that_cannot_be_are_errors() {
    let mut noise = Noise(5);
    let set = runs(&mut noise, 2, None);
    for confidence in [0.0, 1.0, -1.0, f64::NAN] {
        assert!(matches!(stats(&set, confidence), Err(TimingError::Setting { name: "confidence", .. })));
    }
    for threshold in [-0.1, f64::NAN, f64::INFINITY] {
        assert!(matches!(
            diff(&set, &set, 0.9, threshold),
            Err(TimingError::Setting { name: "threshold", .. })
        ));
    }
}
