//! `bench`: measures. `stream` needs a GPU and compares with resident weights and with other libraries (its code is in
//! `tools/bench`); `plan` runs the criterion benches, which measure planning and the schedule on this CPU.
//! Nothing but `--save` writes into the repository.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::python::{Requirements, Venv};
use crate::{process, wheel, workspace};

/// What to measure.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The measurement.
    #[arg(value_enum)]
    name: Name,
    /// Print one JSON object as the last line (`stream`).
    #[arg(long)]
    json: bool,
    /// Write the raw result and a table to docs/performance (`stream`).
    #[arg(long)]
    save: bool,
    /// Take the result from this file instead of measuring: one that `run.py bench stream --out FILE` of a GPU bundle
    /// has written (`stream`).
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Arguments passed on to tools/bench/stream.py, after `--`.
    #[arg(last = true)]
    rest: Vec<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Name {
    /// Step times of a streamed 17 GB diffusion transformer on a GPU.
    Stream,
    /// Planning and the schedule, on this CPU.
    Plan,
}

/// Measures, or renders a measurement made elsewhere.
pub fn run(args: &Args) -> Result<ExitCode> {
    match args.name {
        Name::Plan => plan(),
        Name::Stream => stream(args),
    }
}

/// Runs every criterion bench of the workspace.
fn plan() -> Result<ExitCode> {
    let metadata = workspace::metadata()?;
    let benches =
        metadata.packages.iter().flat_map(|p| p.targets_of("bench").map(move |bench| (&p.name, bench)));
    let benches: Vec<_> = benches.collect();
    if benches.is_empty() {
        bail!("no crate has a bench");
    }
    for (package, bench) in benches {
        process::run(workspace::cargo().args(["bench", "--package", package, "--bench", bench]))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn stream(args: &Args) -> Result<ExitCode> {
    let venv = Venv::ensure(&[Requirements::Base])?;
    let out = workspace::root().join("target/bench-stream.json");
    let result = if let Some(file) = &args.from {
        file.clone()
    } else {
        wheel::install_native(&venv)?;
        let mut python = script(&venv, "stream.py");
        python.arg("--out").arg(&out).args(["--commit", &workspace::commit()]).args(&args.rest);
        let status = process::status(&mut python)?;
        if !status.success() {
            // 3 says that there is no usable GPU, as for gpu-gate.
            return Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)));
        }
        out
    };
    if args.save {
        save(&venv, &result)?;
    }
    if args.json {
        let text =
            fs::read_to_string(&result).with_context(|| format!("cannot read {}", result.display()))?;
        let value: serde_json::Value = serde_json::from_str(&text).context("the result is not JSON")?;
        println!("{value}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Keeps the raw result beside one table made from it.
fn save(venv: &Venv, result: &Path) -> Result<()> {
    let folder = workspace::root().join("docs/performance");
    fs::create_dir_all(&folder)?;
    let raw = folder.join("stream.json");
    if result != raw {
        fs::copy(result, &raw).with_context(|| format!("cannot copy {}", result.display()))?;
    }
    process::run(script(venv, "table.py").arg(&raw).arg("--out").arg(folder.join("README.md")))
}

fn script(venv: &Venv, name: &str) -> std::process::Command {
    let mut python = venv.command();
    python.env_remove("OMP_NUM_THREADS").env_remove("MKL_NUM_THREADS");
    python.arg(workspace::root().join("tools/bench").join(name));
    python
}
