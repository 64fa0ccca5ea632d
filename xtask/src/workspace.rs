//! Where the workspace is, and what cargo and git say about it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::process;

/// The repository's root folder.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The cargo that runs us, so that a toolchain override (`cargo +1.95.0 xtask`) reaches what we start.
pub fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root());
    command
}

/// `--locked` where a changed lock file would go unnoticed: in CI.
pub fn locked() -> &'static [&'static str] {
    if std::env::var_os("CI").is_some() { &["--locked"] } else { &[] }
}

/// What `cargo metadata` says.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    /// The workspace's packages.
    pub packages: Vec<Package>,
}

/// One package of the workspace.
#[derive(Debug, Deserialize)]
pub struct Package {
    /// Its name, which is its folder's.
    pub name: String,
    /// Its version.
    pub version: String,
    /// What its manifest asks for, of every kind.
    pub dependencies: Vec<Dependency>,
    /// What it builds.
    pub targets: Vec<Target>,
}

/// A line of a manifest's dependencies.
#[derive(Debug, Deserialize)]
pub struct Dependency {
    /// The package asked for.
    pub name: String,
    /// Its folder, if it is a package of the workspace.
    pub path: Option<PathBuf>,
}

/// Something a package builds.
#[derive(Debug, Deserialize)]
pub struct Target {
    /// Its name.
    pub name: String,
    /// `lib`, `test`, `bench`, …
    pub kind: Vec<String>,
}

impl Package {
    /// The names of its targets of one kind.
    pub fn targets_of<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a str> {
        self.targets.iter().filter(move |t| t.kind.iter().any(|k| k == kind)).map(|t| t.name.as_str())
    }
}

/// Reads the workspace's manifests through cargo.
pub fn metadata() -> Result<Metadata> {
    let text = process::capture(cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    serde_json::from_str(&text).context("cannot read the output of cargo metadata")
}

/// The commit checked out, with `+changes` where the work tree differs from it; `unknown` outside git.
pub fn commit() -> String {
    let git = |args: &[&str]| process::capture(Command::new("git").current_dir(root()).args(args));
    match (git(&["rev-parse", "HEAD"]), git(&["status", "--porcelain", "--untracked-files=no"])) {
        (Ok(commit), Ok(changes)) if changes.trim().is_empty() => commit.trim().to_owned(),
        (Ok(commit), _) => format!("{}+changes", commit.trim()),
        _ => "unknown".to_owned(),
    }
}
