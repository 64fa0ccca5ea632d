//! `codegen`: everything in the repository that a program wrote, written again or compared.
//!
//! ```text
//! gguf package ──▶ quant-router's grids.rs ──▶ quant-kernels' grids.cuh ─┐
//!                                              other .cuh, and each .cu ─┴─▶ its .ptx
//! ```
//!
//! What compiles is set up in `target/codegen`, apart from `.venv`. `tidy` sees without it whether a source changed since.

pub mod kernels;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::python::Venv;
use crate::{process, workspace};

/// What to do with what is generated.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
pub struct Args {
    /// Fail if a generated file is not what would be written.
    #[arg(long)]
    check: bool,
    /// Write them.
    #[arg(long)]
    write: bool,
}

/// A generated file, and what it should hold.
struct Generated {
    path: PathBuf,
    text: String,
}

/// Writes or checks everything that is generated.
pub fn run(args: &Args) -> Result<ExitCode> {
    let venv = Venv::for_codegen()?;
    let mut stale = Vec::new();
    grids(&venv, args.write, &mut stale)?;
    let folder = workspace::root().join(kernels::FOLDER);
    let grids =
        fs::read_to_string(workspace::root().join(kernels::GRIDS)).context("cannot read the codebooks")?;
    let header = Generated { path: folder.join("grids.cuh"), text: kernels::header(&grids)? };
    settle(&header, args.write, &mut stale)?;
    for generated in ptx(&venv, &folder)? {
        settle(&generated, args.write, &mut stale)?;
    }
    if stale.is_empty() {
        println!("codegen: {}", if args.write { "written" } else { "in sync" });
        return Ok(ExitCode::SUCCESS);
    }
    bail!("not what would be written: {}; run `cargo xtask codegen --write`", stale.join(", "))
}

/// The codebooks, which a script takes from their package.
fn grids(venv: &Venv, write: bool, stale: &mut Vec<String>) -> Result<()> {
    let mut python = venv.command();
    python.arg(workspace::root().join("crates/quant-router/tools/make_grids.py"));
    if write {
        return process::run(&mut python);
    }
    if !process::status(python.arg("--check"))?.success() {
        stale.push(kernels::GRIDS.to_owned());
    }
    Ok(())
}

/// Puts a file in its place, or notes that it is not what is there.
fn settle(generated: &Generated, write: bool, stale: &mut Vec<String>) -> Result<()> {
    let Generated { path, text } = generated;
    if fs::read_to_string(path).is_ok_and(|there| there == *text) {
        return Ok(());
    }
    if write {
        return fs::write(path, text).with_context(|| format!("cannot write {}", path.display()));
    }
    stale.push(path.strip_prefix(workspace::root()).unwrap_or(path).display().to_string());
    Ok(())
}

/// The PTX of every source.
fn ptx(venv: &Venv, folder: &Path) -> Result<Vec<Generated>> {
    let entries = fs::read_dir(folder).context("there is no folder of kernels")?;
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    let ends = |path: &&PathBuf, end: &str| path.extension().is_some_and(|found| found == end);
    let mut headers: Vec<_> = paths.iter().filter(|path| ends(path, "cuh")).collect();
    let mut sources: Vec<_> = paths.iter().filter(|path| ends(path, "cu")).collect();
    headers.sort();
    sources.sort();
    let out = workspace::root().join("target/codegen/ptx");
    let read =
        |path: &Path| fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()));
    let mut by_device = BTreeMap::<u32, Vec<&PathBuf>>::new();
    for &source in &sources {
        by_device.entry(kernels::oldest(&read(source)?)).or_default().push(source);
    }
    for (&oldest, sources) in &by_device {
        let mut python = venv.command();
        python.arg(workspace::root().join("tools/codegen/nvrtc.py")).arg("--out").arg(&out);
        python.arg(format!("--option={}", kernels::architecture(oldest)));
        python.args(kernels::OPTIONS.iter().map(|option| format!("--option={option}")));
        process::run(python.args(sources))?;
    }
    let headers = headers.into_iter().map(|path| read(path)).collect::<Result<Vec<_>>>()?;
    let generated = |source: &&PathBuf| {
        let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let path = source.with_extension("ptx");
        let compiled = read(&out.join(path.file_name().unwrap_or_default()))?;
        let digest = kernels::digest(&read(source)?, headers.iter().map(String::as_str));
        Ok(Generated { path, text: kernels::module(&name, digest, &compiled) })
    };
    sources.iter().map(generated).collect()
}
