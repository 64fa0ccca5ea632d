//! Whether two sets of runs differ, phase by phase, beyond what runs differ anyway.
//!
//! Compared are exclusive times, so that a phase that became slower is flagged itself and not with all that contain it. A
//! difference is flagged if Welch's test finds it at the confidence asked for, shared between all phases (Bonferroni: with
//! fifty phases one in a hundred would be found half the time), and if it is large enough to matter. Of single runs nothing is
//! known about noise, and nothing is flagged.

use serde::Serialize;

use super::runs::{RunSet, check_confidence, moments, quantile, shown};
use super::student;
use crate::error::{Result, TimingError};
use crate::export::Table;

/// One path in both sets. Seconds of exclusive time.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// The names from the top.
    pub path: String,
    /// Its median in the first set; `None` if no run there has it.
    pub before: Option<f64>,
    /// Its median in the second set.
    pub after: Option<f64>,
    /// The difference of means, as a part of the first; `None` if there is none to compare, or the first is 0.
    pub change: Option<f64>,
    /// The probability of such a difference between runs of the same thing; `None` with fewer than two runs on a side.
    pub chance: Option<f64>,
    /// Whether it is beyond noise.
    pub flagged: bool,
}

/// What became of each path.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Comparison {
    /// The paths, in the order of the first set, then those that only the second has.
    pub differences: Vec<Difference>,
    /// Runs of the first set.
    pub before: usize,
    /// Runs of the second.
    pub after: usize,
    /// Runs of either that failed and were left out.
    pub failed: usize,
    /// Whether noise could be told at all.
    pub noise_known: bool,
    /// The probability of any false flag, at most.
    pub confidence: f64,
}

/// Compares. `confidence` is that of all flags together, such as 0.99; differences below `threshold`, as a part of the first
/// set's mean, are not flagged however sure they are.
pub fn diff(before: &RunSet, after: &RunSet, confidence: f64, threshold: f64) -> Result<Comparison> {
    check_confidence(confidence)?;
    if !(0.0..=1e6).contains(&threshold) {
        let wanted = "give a part from 0 up, such as 0.05";
        return Err(TimingError::Setting { name: "threshold", value: threshold.to_string(), wanted });
    }
    for (set, which) in [(before, "first"), (after, "second")] {
        if set.runs == 0 {
            let failed = set.failed();
            return Err(TimingError::Nothing(format!(
                "no run of the {which} set ended well, and {failed} did not"
            )));
        }
    }
    let mut paths: Vec<&str> = before.paths.iter().map(|(path, _)| path.as_str()).collect();
    for (path, _) in &after.paths {
        if before.exclusive(path).is_empty() {
            paths.push(path);
        }
    }
    let alpha = (1.0 - confidence) / paths.len() as f64;
    let differences = paths.iter().map(|path| compare(path, before, after, alpha, threshold)).collect();
    Ok(Comparison {
        differences,
        before: before.runs,
        after: after.runs,
        failed: before.failed() + after.failed(),
        noise_known: before.runs > 1 && after.runs > 1,
        confidence,
    })
}

fn compare(path: &str, before: &RunSet, after: &RunSet, alpha: f64, threshold: f64) -> Difference {
    let (before, after) = (sorted(before.exclusive(path)), sorted(after.exclusive(path)));
    let median = |values: &[f64]| (!values.is_empty()).then(|| quantile(values, 0.5));
    let mut difference = Difference {
        path: path.into(),
        before: median(&before),
        after: median(&after),
        change: None,
        chance: None,
        flagged: false,
    };
    if before.is_empty() || after.is_empty() {
        return difference;
    }
    let ((mean, _), (other, _)) = (moments(&before), moments(&after));
    difference.change = (mean > 0.0).then(|| (other - mean) / mean);
    if before.len() > 1 && after.len() > 1 {
        let chance = welch(&before, &after);
        difference.chance = Some(chance);
        let large = difference.change.map_or(other > 0.0, |change| change.abs() >= threshold);
        difference.flagged = large && chance < alpha;
    }
    difference
}

fn sorted(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

/// The probability that means differ so much by chance, if both sets are of the same mean; their spreads may differ.
fn welch(first: &[f64], second: &[f64]) -> f64 {
    let part = |values: &[f64]| {
        let (mean, variance) = moments(values);
        (mean, variance / values.len() as f64, values.len() as f64 - 1.0)
    };
    let ((mean, error, freedom), (other, other_error, other_freedom)) = (part(first), part(second));
    let sum = error + other_error;
    if sum <= 0.0 {
        return if (mean - other).abs() > 0.0 { 0.0 } else { 1.0 };
    }
    let t = (mean - other).abs() / sum.sqrt();
    let freedom = sum * sum / (error * error / freedom + other_error * other_error / other_freedom);
    student::outside(t, freedom)
}

impl Comparison {
    /// As a table: every path, those beyond noise marked.
    pub fn table(&self) -> Table {
        let columns = [("", false), ("phase", false), ("before", true), ("after", true), ("change", true)];
        let mut table = Table::new(&columns);
        for one in &self.differences {
            let time = |value: Option<f64>| value.map_or_else(|| "-".into(), shown);
            let change = one.change.map_or_else(String::new, |change| format!("{:+.1} %", 100.0 * change));
            let mark = match one.change {
                _ if !one.flagged => "",
                Some(change) if change < 0.0 => "faster",
                _ => "SLOWER",
            };
            table.rows.push(vec![mark.into(), one.path.clone(), time(one.before), time(one.after), change]);
        }
        table.notes.push(String::new());
        table.notes.push(format!("of each phase alone; {} runs before, {} after", self.before, self.after));
        if self.noise_known {
            let percent = 100.0 * self.confidence;
            table
                .notes
                .push(format!("marked is what differs beyond noise, with a confidence of {percent} %"));
        } else {
            table.notes.push(
                "of single runs the noise is not known, so nothing is marked: give several of each".into(),
            );
        }
        if self.failed > 0 {
            table.notes.push(format!("{} runs failed or did not end, and were left out", self.failed));
        }
        table
    }
}
