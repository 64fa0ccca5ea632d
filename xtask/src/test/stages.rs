//! Runs stages one after the other and reports what became of each: nothing named may go missing unseen.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::Shared;
use super::counts::Counts;

/// One stage: a name and what it does.
#[derive(Debug, Clone, Copy)]
pub struct Stage {
    /// What the table calls it.
    pub name: &'static str,
    /// Does it, counting the tests that run.
    pub run: fn(&mut Shared, &mut Counts) -> Result<()>,
}

#[derive(Debug)]
struct Entry {
    name: &'static str,
    outcome: Outcome,
    took: Duration,
    counts: Counts,
    /// What it left out.
    note: Option<&'static str>,
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed(String),
    NotRun,
}

/// What became of every stage.
#[derive(Debug)]
pub struct Report {
    entries: Vec<Entry>,
}

impl Report {
    /// Runs the stages in order; after a failure the others are marked as not run, unless `keep_going`.
    pub fn of(stages: &[Stage], keep_going: bool, mut shared: Shared) -> Self {
        let mut report = Self { entries: Vec::new() };
        for (index, stage) in stages.iter().enumerate() {
            let entry = if report.failed_stages() == 0 || keep_going {
                eprintln!("\n== {} ({} of {})", stage.name, index + 1, stages.len());
                run_one(stage, &mut shared)
            } else {
                Entry {
                    name: stage.name,
                    outcome: Outcome::NotRun,
                    took: Duration::ZERO,
                    counts: Counts::default(),
                    note: None,
                }
            };
            report.entries.push(entry);
        }
        report
    }

    /// Whether every one of `stages` ran and passed.
    pub fn complete(&self, stages: &[Stage]) -> bool {
        let passed =
            |s: &Stage| self.entries.iter().any(|e| e.name == s.name && e.outcome == Outcome::Passed);
        stages.iter().all(passed)
    }

    /// Tests that passed, and stages that run no tests and passed.
    pub fn passed(&self) -> u64 {
        let stage = |e: &Entry| u64::from(e.outcome == Outcome::Passed && e.counts == Counts::default());
        self.entries.iter().map(|e| e.counts.passed + stage(e)).sum()
    }

    /// Tests that failed, and stages that failed without a failed test or did not run.
    pub fn failed(&self) -> u64 {
        let stage = |e: &Entry| u64::from(e.outcome != Outcome::Passed && e.counts.failed == 0);
        self.entries.iter().map(|e| e.counts.failed + stage(e)).sum()
    }

    /// A table for people.
    pub fn table(&self) -> String {
        let mut text = String::from("stage         result      time    tests  note\n");
        for entry in &self.entries {
            let (result, note) = match &entry.outcome {
                Outcome::Passed => ("passed", entry.note.unwrap_or_default()),
                Outcome::Failed(why) => ("FAILED", why.as_str()),
                Outcome::NotRun => ("not run", ""),
            };
            let seconds = entry.took.as_secs_f64();
            let tests = if entry.counts == Counts::default() {
                String::new()
            } else {
                entry.counts.passed.to_string()
            };
            let line = format!("{:<13} {result:<8} {seconds:>6.1} s {tests:>8}  {note}", entry.name);
            let _ = writeln!(text, "{}", line.trim_end());
        }
        text
    }

    /// The same for programs.
    pub fn json(&self) -> serde_json::Value {
        let stage = |entry: &Entry| {
            let result = match entry.outcome {
                Outcome::Passed => "passed",
                Outcome::Failed(_) => "failed",
                Outcome::NotRun => "not run",
            };
            serde_json::json!({
                "name": entry.name, "result": result, "seconds": entry.took.as_secs_f64(),
                "passed": entry.counts.passed, "failed": entry.counts.failed, "note": entry.note,
            })
        };
        serde_json::json!({
            "passed": self.passed(), "failed": self.failed(),
            "seconds": self.entries.iter().map(|e| e.took.as_secs_f64()).sum::<f64>(),
            "stages": self.entries.iter().map(stage).collect::<Vec<_>>(),
        })
    }

    fn failed_stages(&self) -> usize {
        self.entries.iter().filter(|e| e.outcome != Outcome::Passed).count()
    }
}

fn run_one(stage: &Stage, shared: &mut Shared) -> Entry {
    let start = Instant::now();
    let mut counts = Counts::default();
    shared.note = None;
    let outcome = match (stage.run)(shared, &mut counts) {
        Ok(()) => Outcome::Passed,
        Err(error) => {
            eprintln!("{} failed: {error:#}", stage.name);
            Outcome::Failed(reason(&error, counts))
        }
    };
    Entry { name: stage.name, outcome, took: start.elapsed(), counts, note: shared.note }
}

/// Why a stage failed, in a few words for the table; the whole error was printed when it happened.
fn reason(error: &anyhow::Error, counts: Counts) -> String {
    if counts.failed > 0 {
        return format!("{} failed", counts.failed);
    }
    let text = error.to_string();
    text.split_once("` failed: ")
        .map_or(text.as_str(), |(_, status)| status)
        .lines()
        .next()
        .unwrap_or_default()
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Stage = Stage {
        name: "good",
        run: |_, counts| {
            counts.passed = 3;
            Ok(())
        },
    };
    const QUIET: Stage = Stage { name: "quiet", run: |_, _| Ok(()) };
    const BAD: Stage = Stage { name: "bad", run: |_, _| anyhow::bail!("broken") };

    #[test]
    fn a_failure_stops_the_run_and_nothing_goes_missing() {
        let stages = [GOOD, BAD, QUIET];
        let report = Report::of(&stages, false, Shared::default());
        assert!(!report.complete(&stages));
        assert_eq!((report.passed(), report.failed()), (3, 2));
        assert!(report.table().contains("not run"), "{}", report.table());
        let report = Report::of(&stages, true, Shared::default());
        assert_eq!((report.passed(), report.failed()), (4, 1));
    }

    #[test]
    fn what_a_stage_left_out_stands_in_the_table_beside_it() {
        let partial = Stage {
            name: "partial",
            run: |shared, _| {
                shared.note = Some("a crate was left out");
                Ok(())
            },
        };
        let report = Report::of(&[partial, QUIET], false, Shared::default());
        let table = report.table();
        let noted: Vec<_> = table.lines().filter(|line| line.ends_with("a crate was left out")).collect();
        assert!(noted.len() == 1 && noted[0].starts_with("partial"), "{table}");
        assert_eq!(report.json()["stages"][0]["note"], "a crate was left out");
        assert!(report.json()["stages"][1]["note"].is_null());
    }

    #[test]
    fn the_table_says_why_in_a_few_words() {
        let error = anyhow::anyhow!("`cargo clippy --workspace` failed: exit status: 101\nmore");
        assert_eq!(reason(&error, Counts::default()), "exit status: 101");
        assert_eq!(reason(&error, Counts { passed: 3, failed: 2 }), "2 failed");
        assert_eq!(reason(&anyhow::anyhow!("no test ran"), Counts::default()), "no test ran");
    }

    #[test]
    fn a_stage_that_is_named_and_did_not_run_fails_the_whole() {
        let report = Report::of(&[GOOD], false, Shared::default());
        assert!(report.complete(&[GOOD]));
        assert!(!report.complete(&[GOOD, QUIET]));
    }
}
