//! Tables for terminals, and the tree of a report as one.

use std::fmt;

use crate::error::Result;
use crate::phase::Status;
use crate::report::{PartState, Report};

/// A column of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// Its heading.
    pub heading: &'static str,
    /// Whether it holds numbers, which end at its right edge.
    pub numbers: bool,
}

/// Rows of text in columns. Shown, control characters become `?`: names come from files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// The columns.
    pub columns: Vec<Column>,
    /// The rows, each with an entry a column.
    pub rows: Vec<Vec<String>>,
    /// Lines below it.
    pub notes: Vec<String>,
}

impl Table {
    pub(crate) fn new(columns: &[(&'static str, bool)]) -> Self {
        let columns = columns.iter().map(|&(heading, numbers)| Column { heading, numbers }).collect();
        Self { columns, rows: Vec::new(), notes: Vec::new() }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let heading: Vec<String> = self.columns.iter().map(|column| column.heading.to_owned()).collect();
        let rows: Vec<Vec<String>> = std::iter::once(&heading)
            .chain(&self.rows)
            .map(|row| row.iter().map(|text| shown(text)).collect())
            .collect();
        let width = |place: usize| {
            rows.iter().map(|row| row.get(place).map_or(0, |text| text.chars().count())).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns.len()).map(width).collect();
        for row in rows {
            let mut line = String::new();
            for ((text, column), width) in row.iter().zip(&self.columns).zip(&widths) {
                if !line.is_empty() {
                    line.push_str("  ");
                }
                let space = " ".repeat(width.saturating_sub(text.chars().count()));
                let (before, after) =
                    if column.numbers { (space.as_str(), "") } else { ("", space.as_str()) };
                line.push_str(before);
                line.push_str(text);
                line.push_str(after);
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        for note in &self.notes {
            writeln!(f, "{}", shown(note))?;
        }
        Ok(())
    }
}

fn shown(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Nanoseconds with three digits that count, in the unit that suits them.
pub(crate) fn duration(nanoseconds: u64) -> String {
    let time = nanoseconds as f64;
    match nanoseconds {
        0..1_000 => format!("{nanoseconds} ns"),
        1_000..1_000_000 => format!("{:.1} µs", time / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", time / 1e6),
        _ => format!("{:.3} s", time / 1e9),
    }
}

/// The phases as a tree, with inclusive and exclusive time, and what a reader must know below.
pub fn table(report: &Report) -> Result<Table> {
    let analysis = report.analysis()?;
    let mut table = Table::new(&[
        ("phase", false),
        ("start", true),
        ("time", true),
        ("of it alone", true),
        ("share", true),
    ]);
    for index in analysis.walk() {
        let phase = &report.phases[index];
        let mark = match (phase.status, &phase.error_type) {
            (Status::Success, _) => String::new(),
            (Status::Open, _) => "  (open)".into(),
            (Status::Error, Some(error)) => format!("  ({error})"),
            (Status::Error, None) => "  (error)".into(),
        };
        let share = 100.0 * phase.duration as f64 / (report.duration as f64).max(1.0);
        table.rows.push(vec![
            format!("{}{}{mark}", "  ".repeat(analysis.depth[index]), phase.name),
            duration(phase.start),
            duration(phase.duration),
            duration(analysis.exclusive[index]),
            format!("{share:.1} %"),
        ]);
    }
    let ended = if report.complete { "" } else { "; it did not end" };
    table.notes.push(String::new());
    table.notes.push(format!(
        "recorded {}{ended}, of which {} in no phase",
        duration(report.duration),
        duration(analysis.gap)
    ));
    if analysis.overlap > 0 {
        table.notes.push(format!("{} ran beside other phases", duration(analysis.overlap)));
    }
    if report.synchronization() > 0 {
        table.notes.push(format!("{} in the synchronization callback", duration(report.synchronization())));
    }
    if report.dropped > 0 {
        table.notes.push(format!("{} phases were beyond the limits and not recorded", report.dropped));
    }
    if let [facts] = report.processes.as_slice()
        && let Some(age) = facts.age
    {
        table.notes.push(format!("the process was {} old when recording began", duration(age)));
    }
    for facts in report.processes.iter().filter(|facts| facts.state != PartState::Complete) {
        let file = facts.file.as_deref().map(|file| format!(" ({file})")).unwrap_or_default();
        let problem = facts.problem.as_deref().unwrap_or("the recording did not end");
        table.notes.push(format!("{}{file}: {problem}", facts.label()));
    }
    table.notes.extend(report.notes.iter().cloned());
    Ok(table)
}
