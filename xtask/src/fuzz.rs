//! `fuzz`: runs one fuzz target for a while, with cargo-fuzz and the nightly compiler. On the stable compiler the tests of the
//! crates replay the corpora; this looks for new inputs, which stay in `target` until they are copied.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::{process, workspace};

/// The crates with targets. Each target starts from its own corpus and from the files of its crate's tests.
const CRATES: &[&str] = &[
    "crates/checkpoint",
    "crates/quant-router",
    "crates/lora-runtime",
    "crates/startup-timing",
    "crates/profile-store",
];
const SEEDS: &str = "tests/corpus";
/// Bytes of an input: enough for any header that says something.
const MAX_LENGTH: &str = "-max_len=65536";
/// Seconds after which one input is too slow, and MiB beyond which it takes too much.
const BOUNDS: [&str; 2] = ["-timeout=10", "-rss_limit_mb=2048"];

/// What to fuzz and for how long.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The target: a file of fuzz/targets in a crate. Without it, the targets are listed.
    name: Option<String>,
    /// How long, in seconds.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: u64,
    /// Print one JSON object as the last line: target, seconds, inputs, new, crashes.
    #[arg(long)]
    json: bool,
}

/// Fuzzes. Exit status 0: nothing was found; 1: something was, or the fuzzer could not run; the last line says which.
pub fn run(args: &Args) -> Result<ExitCode> {
    let targets = targets()?;
    let Some(name) = &args.name else {
        let names: Vec<_> = targets.keys().map(String::as_str).collect();
        let list = serde_json::json!({ "targets": names });
        println!("{}", if args.json { list.to_string() } else { names.join("\n") });
        return Ok(ExitCode::SUCCESS);
    };
    let Some(folder) = targets.get(name) else {
        let names: Vec<_> = targets.keys().map(String::as_str).collect();
        bail!("there is no fuzz target {name}; there are {}", names.join(", "));
    };
    needs("cargo-fuzz", &["fuzz", "--version"], "`cargo install cargo-fuzz`")?;
    needs("the nightly compiler", &["+nightly", "--version"], "`rustup toolchain install nightly`")?;
    let outcome = fuzz(folder, name, args.seconds)?;
    if args.json {
        println!("{}", outcome.json(name));
    } else {
        println!("{name}: {} inputs, {} new, {} crashes", outcome.inputs, outcome.new, outcome.crashes.len());
    }
    for crash in &outcome.crashes {
        eprintln!("crash: {}", crash.display());
    }
    Ok(if outcome.clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What came of a run.
#[derive(Debug, Default)]
struct Outcome {
    seconds: f64,
    /// How many inputs were tried.
    inputs: u64,
    /// How many were kept, because they reach what none did before.
    new: usize,
    /// Inputs on which the target failed.
    crashes: Vec<PathBuf>,
    /// Whether the fuzzer itself ended well.
    ended_well: bool,
}

impl Outcome {
    fn clean(&self) -> bool {
        self.ended_well && self.crashes.is_empty()
    }

    fn json(&self, name: &str) -> serde_json::Value {
        serde_json::json!({
            "target": name, "seconds": self.seconds, "inputs": self.inputs, "new": self.new,
            "crashes": self.crashes, "clean": self.clean(),
        })
    }
}

fn fuzz(folder: &Path, name: &str, seconds: u64) -> Result<Outcome> {
    let work = workspace::root().join("target/fuzz");
    let (found, crashes) = (work.join("corpus").join(name), work.join("crashes").join(name));
    for folder in [&found, &crashes] {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let before = (files_below(&found)?.len(), files_below(&crashes)?);
    let seeds = work.join("seeds").join(name);
    gather(&folder.join(SEEDS), &seeds)?;

    let cargo_fuzz = |act: &str| {
        let mut words = vec!["+nightly".into(), "fuzz".into(), act.into(), "--target-dir".into()];
        words.extend([work.join("build").into_os_string(), name.into()]);
        words
    };
    process::run(command(folder).args(cargo_fuzz("build")))?;
    // The fuzzer writes to its error stream.
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec cargo \"$@\" 2>&1", "sh"]).args(cargo_fuzz("run"));
    shell.args([&found, &corpus(folder, name), &seeds]);
    shell.arg("--").arg(format!("-max_total_time={seconds}")).args([MAX_LENGTH, "-print_final_stats=1"]);
    shell.args(BOUNDS).arg(format!("-artifact_prefix={}/", crashes.display()));
    let start = Instant::now();
    let mut inputs = None;
    let ended = process::tee(in_folder(&mut shell, folder), |line| inputs = executed(line).or(inputs));
    let seconds = start.elapsed().as_secs_f64();
    let inputs = inputs.unwrap_or(0);
    let crashes: Vec<_> =
        files_below(&crashes)?.into_iter().filter(|crash| !before.1.contains(crash)).collect();
    if let Err(error) = &ended
        && crashes.is_empty()
    {
        bail!("the fuzzer did not run: {error}");
    }
    let new = files_below(&found)?.len().saturating_sub(before.0);
    Ok(Outcome { seconds, inputs, new, crashes, ended_well: ended.is_ok() })
}

/// A cargo that picks its own compiler, in a crate's folder.
fn command(folder: &Path) -> Command {
    let mut cargo = Command::new("cargo");
    in_folder(&mut cargo, folder);
    cargo
}

/// Runs it where the targets are. The stable cargo that runs us must not pass its compiler on to the nightly one.
fn in_folder<'a>(command: &'a mut Command, folder: &Path) -> &'a mut Command {
    for variable in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "RUST_RECURSION_COUNT"] {
        command.env_remove(variable);
    }
    command.current_dir(folder)
}

/// The number of inputs tried, from libFuzzer's final statistics.
fn executed(line: &str) -> Option<u64> {
    line.strip_prefix("stat::number_of_executed_units:")?.trim().parse().ok()
}

fn corpus(folder: &Path, name: &str) -> PathBuf {
    folder.join("fuzz/corpus").join(name)
}

/// Every target, and the folder of its crate.
fn targets() -> Result<BTreeMap<String, PathBuf>> {
    let mut targets = BTreeMap::new();
    for folder in CRATES.iter().map(|folder| workspace::root().join(folder)) {
        for path in files_below(&folder.join("fuzz/targets"))? {
            let name = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            if targets.insert(name.to_owned(), folder.clone()).is_some() {
                bail!("two fuzz targets are named {name}");
            }
        }
    }
    Ok(targets)
}

/// Fails, saying what to do, if a tool is not there.
fn needs(what: &str, words: &[&str], how: &str) -> Result<()> {
    let outcome = process::capture(command(workspace::root()).args(words));
    outcome.map(drop).with_context(|| format!("fuzzing needs {what}, which is not installed: {how}"))
}

/// Every file below a folder.
fn files_below(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut open = vec![folder.to_owned()];
    let mut files = Vec::new();
    while let Some(folder) = open.pop() {
        let entries = fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() { open.push(path) } else { files.push(path) }
        }
    }
    Ok(files)
}

/// Copies the files below a folder into one without folders, which is what the fuzzer reads.
fn gather(from: &Path, into: &Path) -> Result<()> {
    fs::create_dir_all(into).with_context(|| format!("cannot create {}", into.display()))?;
    for (number, path) in files_below(from)?.into_iter().enumerate() {
        fs::copy(&path, into.join(number.to_string()))
            .with_context(|| format!("cannot copy {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_a_corpus_and_an_entry() {
        let targets = targets().unwrap();
        assert!(targets.contains_key("safetensors_header"), "{targets:?}");
        for (name, folder) in targets {
            let manifest = fs::read_to_string(folder.join("fuzz/Cargo.toml")).unwrap();
            assert!(!files_below(&corpus(&folder, &name)).unwrap().is_empty(), "{name}");
            assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name}");
        }
    }

    #[test]
    fn statistics_are_read() {
        assert_eq!(executed("stat::number_of_executed_units: 1234"), Some(1234));
        assert_eq!(executed("#2 INITED cov: 4"), None);
    }

    #[test]
    fn a_run_that_found_something_is_not_clean() {
        let mut outcome = Outcome { ended_well: true, ..Outcome::default() };
        assert!(outcome.clean());
        outcome.crashes.push("crash-1".into());
        assert!(!outcome.clean() && outcome.json("x")["crashes"][0] == "crash-1");
    }

    #[test]
    fn an_unknown_target_and_a_missing_tool_are_errors_that_say_what_to_do() {
        let args = Args { name: Some("nothing".into()), seconds: 1, json: false };
        assert!(run(&args).unwrap_err().to_string().contains("shard_index"));
        let missing = needs("a tool", &["no-such-command"], "install it").unwrap_err().to_string();
        assert!(missing.contains("needs a tool") && missing.contains("install it"));
    }
}
