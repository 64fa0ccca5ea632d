//! Sets of runs, and what is typical of them.

use std::collections::BTreeMap;

use serde::Serialize;

use super::student;
use crate::error::{Result, TimingError};
use crate::export::Table;
use crate::phase::Status;
use crate::report::Report;

/// Between the names of a path.
const SEPARATOR: &str = " / ";
/// The path of the recording as a whole.
const WHOLE: &str = "(recording)";
/// The path of what no phase covers.
const GAP: &str = "(in no phase)";

/// The runs of one start. Those that failed or did not end are left out and counted.
#[derive(Debug, Clone, Default)]
pub struct RunSet {
    /// For each path, in the order of the first run that has it: inclusive and exclusive nanoseconds of each run that has it.
    pub(super) paths: Vec<(String, Vec<Times>)>,
    places: BTreeMap<String, usize>,
    pub(super) runs: usize,
    failed: usize,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Times {
    pub(super) inclusive: u64,
    pub(super) exclusive: u64,
}

impl RunSet {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a run.
    pub fn add(&mut self, report: &Report) -> Result<()> {
        let failed = |phase: &crate::phase::Phase| phase.parent.is_none() && phase.status != Status::Success;
        if !report.complete || report.phases.iter().any(failed) {
            self.failed += 1;
            return Ok(());
        }
        let analysis = report.analysis()?;
        let paths = analysis.paths(&report.phases, SEPARATOR, |phase| phase.name.clone())?;
        let whole = Times { inclusive: report.duration, exclusive: report.duration };
        let gap = Times { inclusive: analysis.gap, exclusive: analysis.gap };
        // Phases of one path are one: a loop of ten reads is what all ten took.
        let mut sums: BTreeMap<&str, Times> = BTreeMap::from([(WHOLE, whole), (GAP, gap)]);
        let mut order = vec![WHOLE, GAP];
        for ((path, phase), exclusive) in paths.iter().zip(&report.phases).zip(&analysis.exclusive) {
            let sum = sums.entry(path).or_insert_with(|| {
                order.push(path);
                Times::default()
            });
            sum.inclusive = sum.inclusive.saturating_add(phase.duration);
            sum.exclusive = sum.exclusive.saturating_add(*exclusive);
        }
        for path in order {
            let place = *self.places.entry(path.to_owned()).or_insert_with(|| {
                self.paths.push((path.to_owned(), Vec::new()));
                self.paths.len() - 1
            });
            self.paths[place].1.push(sums[path]);
        }
        self.runs += 1;
        Ok(())
    }

    /// Runs that count.
    pub fn runs(&self) -> usize {
        self.runs
    }

    /// Runs that were left out.
    pub fn failed(&self) -> usize {
        self.failed
    }

    pub(super) fn exclusive(&self, path: &str) -> Vec<f64> {
        let Some(&place) = self.places.get(path) else { return Vec::new() };
        self.paths[place].1.iter().map(|times| super::runs::seconds(times.exclusive)).collect()
    }
}

pub(super) fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}

/// How long one path takes, in seconds.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Distribution {
    /// The names from the top.
    pub path: String,
    /// Runs that have it.
    pub runs: usize,
    /// The median of its inclusive time.
    pub median: f64,
    /// The time that nine of ten runs do not exceed, by linear interpolation between runs.
    pub p90: f64,
    /// The median of its exclusive time.
    pub exclusive: f64,
    /// An interval that holds the mean of its inclusive time with the confidence asked for; none of a single run.
    pub interval: Option<(f64, f64)>,
}

/// What is typical of each path. `confidence` is that of the intervals, such as 0.95.
pub fn stats(set: &RunSet, confidence: f64) -> Result<Vec<Distribution>> {
    check_confidence(confidence)?;
    if set.runs == 0 {
        let failed = set.failed;
        return Err(TimingError::Nothing(format!("no run ended well, and {failed} did not")));
    }
    let of = |(path, times): &(String, Vec<Times>)| {
        let sorted = |value: fn(&Times) -> u64| {
            let mut values: Vec<f64> = times.iter().map(|times| seconds(value(times))).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let inclusive = sorted(|times| times.inclusive);
        Distribution {
            path: path.clone(),
            runs: times.len(),
            median: quantile(&inclusive, 0.5),
            p90: quantile(&inclusive, 0.9),
            exclusive: quantile(&sorted(|times| times.exclusive), 0.5),
            interval: interval(&inclusive, confidence),
        }
    };
    Ok(set.paths.iter().map(of).collect())
}

pub(super) fn check_confidence(confidence: f64) -> Result<()> {
    if confidence > 0.0 && confidence < 1.0 {
        return Ok(());
    }
    let wanted = "give a number between 0 and 1, such as 0.95";
    Err(TimingError::Setting { name: "confidence", value: confidence.to_string(), wanted })
}

/// The interval of the mean, by Student's distribution.
fn interval(values: &[f64], confidence: f64) -> Option<(f64, f64)> {
    if values.len() < 2 {
        return None;
    }
    let (mean, variance) = moments(values);
    let reach =
        student::quantile(confidence, values.len() as f64 - 1.0) * (variance / values.len() as f64).sqrt();
    Some((mean - reach, mean + reach))
}

/// Mean and sample variance.
pub(super) fn moments(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (mean, if values.len() < 2 { 0.0 } else { squares / (count - 1.0) })
}

/// A quantile of sorted values.
pub(super) fn quantile(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = part * last as f64;
    #[expect(clippy::cast_sign_loss, reason = "a place in a list")]
    let below = (place.floor() as usize).min(last);
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

/// Seconds in a table.
pub(super) fn shown(seconds: f64) -> String {
    #[expect(clippy::cast_sign_loss, reason = "the sign is shown apart")]
    let size = crate::export::duration((seconds.abs() * 1e9).round() as u64);
    if seconds < 0.0 { format!("-{size}") } else { size }
}

impl RunSet {
    /// The distributions as a table.
    pub fn table(&self, distributions: &[Distribution], confidence: f64) -> Table {
        let mut table = Table::new(&[
            ("phase", false),
            ("runs", true),
            ("median", true),
            ("p90", true),
            ("of it alone", true),
            ("interval of the mean", true),
        ]);
        for one in distributions {
            let interval = one
                .interval
                .map_or_else(String::new, |(from, to)| format!("{} to {}", shown(from), shown(to)));
            let numbers = [shown(one.median), shown(one.p90), shown(one.exclusive), interval];
            table.rows.push([one.path.clone(), one.runs.to_string()].into_iter().chain(numbers).collect());
        }
        table.notes.push(String::new());
        table.notes.push(format!("{} runs, intervals at {} %", self.runs, 100.0 * confidence));
        if self.failed > 0 {
            table.notes.push(format!("{} runs failed or did not end, and were left out", self.failed));
        }
        table
    }
}
