//! `bench`: measures. `stream` needs a GPU and compares with resident weights and with other libraries; so does `ready`,
//! which measures how soon a checkpoint streams, and how fast what is not page-locked does; `load` compares
//! reading a checkpoint with safetensors' own reader and with the bare device; `dequant` measures the
//! kernels of quantized weights on a GPU, `quantized` a streamed model of them, `lora` steps with adapters and loading one, `pipeline`
//! three models that take turns,
//! `calibrate` how near a recommended budget is to the largest that runs
//! (the code of all is in `tools/bench`);
//! `plan` runs the criterion benches, which measure planning and the schedule on this CPU; `startup` what collecting startup
//! timings costs a start, on any machine.
//! Nothing but `--save` writes into the repository.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

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
    /// Print one JSON object as the last line (all but `plan`).
    #[arg(long)]
    json: bool,
    /// Write the raw result, and a table but for `startup`, to docs/performance (all but `plan`).
    #[arg(long)]
    save: bool,
    /// Take the result from this file instead of measuring: one that `run.py bench NAME --out FILE` of a GPU bundle
    /// has written.
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// GiB of the file that is read (`load`).
    #[arg(long)]
    size: Option<f64>,
    /// Arguments passed on to the script in tools/bench, after `--`.
    #[arg(last = true)]
    rest: Vec<String>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Name {
    /// Step times of a streamed 17 GB diffusion transformer on a GPU.
    Stream,
    /// Reading a checkpoint into RAM, on this machine's device and CPU.
    Load,
    /// From a checkpoint in the page cache to a streaming model, and streaming what is not page-locked, on a GPU.
    Ready,
    /// Quantized weights to numbers on a GPU, every format.
    Dequant,
    /// Steps of a streamed model of int8 weights beside bfloat16 ones, on a GPU.
    Quantized,
    /// Steps with LoRAs beside none and beside PEFT's, resident and streamed, and loading one, on a GPU.
    Lora,
    /// Three models of 19 GB that take turns on a GPU within 4 GB.
    Pipeline,
    /// The resident budget that a calibration recommends beside the largest that runs, on a GPU.
    Calibrate,
    /// Planning and the schedule, on this CPU.
    Plan,
    /// What collecting startup timings costs a start, on this machine.
    Startup,
}

/// Measures, or renders a measurement made elsewhere.
pub fn run(args: &Args) -> Result<ExitCode> {
    match args.name {
        Name::Plan => plan(),
        Name::Stream => stream(args),
        Name::Load => load(args),
        Name::Ready => ready(args),
        Name::Dequant => paged(args, "dequant"),
        Name::Quantized => paged(args, "quantized"),
        Name::Lora => paged(args, "lora"),
        Name::Pipeline => paged(args, "pipeline"),
        Name::Calibrate => paged(args, "calibrate"),
        Name::Startup => startup(args),
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
    let result = match on_gpu(args, &venv, "stream", |_| Ok(()))? {
        Ok(result) => result,
        Err(code) => return Ok(code),
    };
    if args.save {
        save(&venv, &result)?;
    }
    show(args, &result)
}

/// The result of tools/bench/NAME.py, measured here or given; or the exit status of one that did not measure.
fn on_gpu(
    args: &Args,
    venv: &Venv,
    name: &str,
    prepare: impl FnOnce(&mut Command) -> Result<()>,
) -> Result<Result<PathBuf, ExitCode>> {
    if let Some(file) = &args.from {
        return Ok(Ok(file.clone()));
    }
    wheel::install_native(venv)?;
    let out = workspace::root().join(format!("target/bench-{name}.json"));
    let mut python = script(venv, &format!("{name}.py"));
    python.arg("--out").arg(&out).args(["--commit", &workspace::commit()]);
    prepare(&mut python)?;
    let status = process::status(python.args(&args.rest))?;
    if !status.success() {
        // 3 says that there is no usable GPU, as for gpu-gate.
        let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        return Ok(Err(ExitCode::from(code)));
    }
    Ok(Ok(out))
}

/// Prints the result if that is asked for.
fn show(args: &Args, result: &Path) -> Result<ExitCode> {
    if args.json {
        println!("{}", value(result)?);
    }
    Ok(ExitCode::SUCCESS)
}

/// Our reader and others in turns, in one run of tools/bench/load.py.
fn load(args: &Args) -> Result<ExitCode> {
    let venv = Venv::ensure(&[Requirements::Base])?;
    let result = if let Some(file) = &args.from {
        file.clone()
    } else {
        let example = ["build", "--release", "--package", "checkpoint", "--example", "load"];
        process::run(workspace::cargo().args(example).args(workspace::locked()))?;
        let reader = examples().join("load");
        let out = workspace::root().join("target/bench-load.json");
        let mut python = script(&venv, "load.py");
        python.arg("--reader").arg(reader).arg("--out").arg(&out).args(["--commit", &workspace::commit()]);
        if let Some(size) = args.size {
            python.arg("--size").arg(size.to_string());
        }
        process::run(python.args(&args.rest))?;
        out
    };
    if args.save {
        let raw = keep(&result, "load.json")?;
        process::run(
            script(&venv, "load.py")
                .arg("--page")
                .arg(&raw)
                .arg("--out")
                .arg(raw.with_file_name("loading.md")),
        )?;
    }
    show(args, &result)
}

/// Runs tools/bench/ready.py with the program that locks a slab.
fn ready(args: &Args) -> Result<ExitCode> {
    let venv = Venv::ensure(&[Requirements::Base])?;
    let locker = |python: &mut Command| {
        let example = ["build", "--release", "--package", "pinned-pool", "--example", "lock_slab"];
        process::run(workspace::cargo().args(example).args(workspace::locked()))?;
        python.arg("--locker").arg(examples().join("lock_slab"));
        Ok(())
    };
    let result = match on_gpu(args, &venv, "ready", locker)? {
        Ok(result) => result,
        Err(code) => return Ok(code),
    };
    if args.save {
        let raw = keep(&result, "ready.json")?;
        let page = raw.with_file_name("ready.md");
        process::run(script(&venv, "ready.py").arg("--page").arg(&raw).arg("--out").arg(page))?;
    }
    show(args, &result)
}

/// Runs tools/bench/NAME.py, which also makes the page of a result.
fn paged(args: &Args, name: &str) -> Result<ExitCode> {
    let venv = Venv::ensure(&[Requirements::Base])?;
    let result = match on_gpu(args, &venv, name, |_| Ok(()))? {
        Ok(result) => result,
        Err(code) => return Ok(code),
    };
    if args.save {
        let raw = keep(&result, &format!("{name}.json"))?;
        let page = raw.with_extension("md");
        process::run(script(&venv, &format!("{name}.py")).arg("--page").arg(&raw).arg("--out").arg(page))?;
    }
    show(args, &result)
}

/// Where cargo puts example programs.
fn examples() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    workspace::root().join(target).join("release/examples")
}

/// Runs tools/bench/startup.py, which fails if collecting takes more of a start than it may.
fn startup(args: &Args) -> Result<ExitCode> {
    let venv = Venv::ensure(&[Requirements::Base])?;
    let result = match on_gpu(args, &venv, "startup", |_| Ok(()))? {
        Ok(result) => result,
        Err(code) => return Ok(code),
    };
    if args.save {
        keep(&result, "startup.json")?;
    }
    show(args, &result)
}

fn value(result: &Path) -> Result<serde_json::Value> {
    let text = fs::read_to_string(result).with_context(|| format!("cannot read {}", result.display()))?;
    serde_json::from_str(&text).context("the result is not JSON")
}

/// Keeps the raw result beside one table made from it.
fn save(venv: &Venv, result: &Path) -> Result<()> {
    let raw = keep(result, "stream.json")?;
    process::run(script(venv, "table.py").arg(&raw).arg("--out").arg(raw.with_file_name("README.md")))
}

/// Puts a result into docs/performance, and says where it is there.
fn keep(result: &Path, name: &str) -> Result<PathBuf> {
    let folder = workspace::root().join("docs/performance");
    fs::create_dir_all(&folder)?;
    let raw = folder.join(name);
    put(result, &raw)?;
    Ok(raw)
}

/// Copies a small file, which may be the target under another name: it is read before anything is written.
fn put(from: &Path, to: &Path) -> Result<()> {
    let content = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
    fs::write(to, content).with_context(|| format!("cannot write {}", to.display()))
}

fn script(venv: &Venv, name: &str) -> Command {
    let mut python = venv.command();
    python.env_remove("OMP_NUM_THREADS").env_remove("MKL_NUM_THREADS");
    python.arg(workspace::root().join("tools/bench").join(name));
    python
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_that_is_kept_already_stays_whatever_its_path_is_spelt_like() {
        let folder = tempfile::tempdir().unwrap();
        let raw = folder.path().join("load.json");
        fs::write(&raw, "{}").unwrap();
        let link = folder.path().join("link.json");
        std::os::unix::fs::symlink(&raw, &link).unwrap();
        for spelling in [raw.clone(), folder.path().join(".").join("load.json"), link] {
            put(&spelling, &raw).unwrap();
            assert_eq!(fs::read_to_string(&raw).unwrap(), "{}", "{}", spelling.display());
        }
        assert!(put(&folder.path().join("none.json"), &raw).is_err());
        assert_eq!(fs::read_to_string(&raw).unwrap(), "{}");
    }
}
