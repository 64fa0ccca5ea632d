//! `tidy`: the rules of the repository that no compiler checks. Each is a pure function from files to findings.

mod arrows;
mod modules;
mod opening;
mod sync;
mod unsafe_code;
mod words;

use std::fmt;
use std::fs;
use std::process::{Command, ExitCode};

use anyhow::{Result, bail};

use crate::{process, workspace};

/// How to print what is found.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print one JSON object as the last line: files, findings.
    #[arg(long)]
    json: bool,
}

/// A file of the repository, as text.
#[derive(Debug, Clone)]
pub struct SourceFile {
    /// Its path from the repository's root, with `/`.
    pub path: String,
    /// What is in it.
    pub text: String,
}

impl SourceFile {
    /// Whether its name ends so.
    pub fn is(&self, extension: &str) -> bool {
        self.path.rsplit_once('.').is_some_and(|(_, found)| found == extension)
    }

    /// The crate it belongs to: the folder below `crates/`, or `xtask`.
    pub fn package(&self) -> Option<&str> {
        let mut parts = self.path.split('/');
        match parts.next() {
            Some("crates") => parts.next(),
            Some("xtask") => Some("xtask"),
            _ => None,
        }
    }
}

/// One place where a rule is broken.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// The file.
    pub path: String,
    /// The line, from 1; 0 for the file as a whole.
    pub line: usize,
    /// What is wrong and what to do.
    pub message: String,
}

impl Finding {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.path, self.message),
            line => write!(f, "{}:{line}: {}", self.path, self.message),
        }
    }
}

/// Checks the repository and prints what is found.
pub fn run(args: &Args) -> Result<ExitCode> {
    let files = files()?;
    let findings = findings(&files)?;
    print_findings(&files, &findings);
    if args.json {
        println!("{}", serde_json::json!({ "files": files.len(), "findings": findings }));
    } else {
        println!("tidy: {} files, {} findings", files.len(), findings.len());
    }
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Checks the repository; anything found is an error.
pub fn check() -> Result<()> {
    let files = files()?;
    let findings = findings(&files)?;
    print_findings(&files, &findings);
    if !findings.is_empty() {
        bail!("tidy has {} findings", findings.len());
    }
    Ok(())
}

fn print_findings(files: &[SourceFile], findings: &[Finding]) {
    for (path, lines) in opening::long_files(files) {
        eprintln!("long: {path} has {lines} lines; think about splitting it at {}", opening::THINK);
    }
    for finding in findings {
        eprintln!("{finding}");
    }
}

fn findings(files: &[SourceFile]) -> Result<Vec<Finding>> {
    let metadata = workspace::metadata()?;
    let mut all = opening::check(files);
    all.extend(unsafe_code::check(files));
    all.extend(words::check(files));
    all.extend(arrows::check(&metadata, files));
    all.extend(sync::check(&metadata, files));
    all.extend(modules::check(files));
    all.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));
    Ok(all)
}

/// Every text file that git tracks, or would after `git add`.
fn files() -> Result<Vec<SourceFile>> {
    let mut git = Command::new("git");
    git.current_dir(workspace::root()).args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let listed = process::capture(&mut git)?;
    let mut paths: Vec<_> = listed.split('\0').filter(|path| !path.is_empty()).collect();
    paths.sort_unstable();
    paths.dedup();
    let read = |path: &str| {
        // A file deleted but still listed, or one that is not text, has nothing to check.
        let text =
            fs::read_to_string(workspace::root().join(path)).ok().filter(|text| !text.contains('\0'))?;
        Some(SourceFile { path: path.to_owned(), text })
    };
    Ok(paths.into_iter().filter_map(read).collect())
}

#[cfg(test)]
fn fixture(path: &str, text: &str) -> SourceFile {
    SourceFile { path: path.to_owned(), text: text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_knows_its_crate() {
        assert_eq!(fixture("crates/vmm-alloc/src/lib.rs", "").package(), Some("vmm-alloc"));
        assert_eq!(fixture("xtask/src/main.rs", "").package(), Some("xtask"));
        assert_eq!(fixture("python/weightstream/__init__.py", "").package(), None);
        assert!(fixture("a/b.rs", "").is("rs") && !fixture("a/rs", "").is("rs"));
    }

    #[test]
    fn findings_print_as_compilers_do() {
        assert_eq!(Finding::new("a.rs", 3, "bad").to_string(), "a.rs:3: bad");
        assert_eq!(Finding::new("a.rs", 0, "bad").to_string(), "a.rs: bad");
    }
}
