//! Folded stacks, which flame graph programs read: a line a path, with its exclusive nanoseconds.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::error::Result;
use crate::phase::Phase;
use crate::report::Report;

/// A line for each path of names, `a;b;c 1234`: exclusive time in nanoseconds, the same paths added up. The lines sum to the
/// sum of all exclusive times.
///
/// What separates in this format cannot be in a name: `;` becomes `:`, spaces and control characters `_`.
pub fn folded_stacks(report: &Report) -> Result<String> {
    let analysis = report.analysis()?;
    let clean = |phase: &Phase| {
        let safe = |c: char| match c {
            ';' => ':',
            c if c.is_whitespace() || c.is_control() => '_',
            c => c,
        };
        let name: String = phase.name.chars().map(safe).collect();
        if name.is_empty() { "_".into() } else { name }
    };
    let paths = analysis.paths(&report.phases, ";", clean)?;
    let mut sums: BTreeMap<&str, u64> = BTreeMap::new();
    for (path, exclusive) in paths.iter().zip(&analysis.exclusive) {
        *sums.entry(path).or_default() += exclusive;
    }
    let mut text = String::new();
    for (path, sum) in sums {
        let _ = writeln!(text, "{path} {sum}");
    }
    Ok(text)
}
