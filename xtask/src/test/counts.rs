//! How many tests ran, as the runners' own closing lines say.

use anyhow::{Result, bail};

/// Tests that passed and failed in one stage. A stage that runs no tests has zero of both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed, or could not start.
    pub failed: u64,
}

impl Counts {
    /// Reads a line of cargo's output: `test result: ok. 12 passed; 0 failed; 1 ignored; …`.
    pub fn see_cargo(&mut self, line: &str) {
        if let Some((_, rest)) = line.split_once("test result: ") {
            self.add(rest);
        }
    }

    /// Reads a line of pytest's output: `3 failed, 12 passed, 2 skipped, 1 error in 4.20s`, with or without rules of
    /// `=` around it.
    pub fn see_pytest(&mut self, line: &str) {
        let line = line.trim_matches(['=', ' ']);
        let closing =
            line.rsplit_once(" in ").filter(|(_, time)| time.starts_with(|c: char| c.is_ascii_digit()));
        if let Some((counts, _)) = closing {
            self.add(counts);
        }
    }

    /// Refuses a stage that should have run tests and ran none.
    pub fn some_ran(&self) -> Result<()> {
        if self.passed == 0 {
            bail!("no test ran");
        }
        Ok(())
    }

    fn add(&mut self, text: &str) {
        let words: Vec<_> = text.split([' ', ';', ',']).filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2) {
            let Ok(count) = pair[0].parse::<u64>() else { continue };
            match pair[1] {
                "passed" => self.passed += count,
                "failed" | "error" | "errors" => self.failed += count,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cargo_lines_add_up() {
        let mut counts = Counts::default();
        counts.see_cargo("running 3 tests");
        counts.see_cargo(
            "test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s",
        );
        counts.see_cargo("test result: FAILED. 4 passed; 2 failed; 0 ignored; 0 measured; 7 filtered out");
        assert_eq!(counts, Counts { passed: 16, failed: 2 });
    }

    #[test]
    fn pytest_closing_lines_are_read_in_both_forms() {
        let mut counts = Counts::default();
        counts.see_pytest("tests/test_a.py ..... [100%]");
        counts.see_pytest("slept 3 passed in the night");
        counts.see_pytest("12 passed, 2 skipped in 4.20s");
        counts.see_pytest("==== 3 failed, 1 passed, 1 error in 65.20s (0:01:05) ====");
        assert_eq!(counts, Counts { passed: 13, failed: 4 });
    }

    #[test]
    fn a_stage_without_tests_has_failed() {
        assert!(Counts::default().some_ran().is_err());
        assert!(Counts { passed: 1, failed: 0 }.some_ran().is_ok());
    }
}
