//! `wheel`: builds the Python wheel. One file serves every CPython from 3.10 on (the stable ABI).

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};

use crate::python::{Requirements, Venv};
use crate::{process, workspace};

/// What to build.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Build for this machine only: faster, and needs no zig. Goes to target/wheels instead of dist.
    #[arg(long)]
    native: bool,
    /// Print one JSON object as the last line: path, bytes.
    #[arg(long)]
    json: bool,
}

/// Builds a wheel and prints where it is.
pub fn run(args: &Args) -> Result<ExitCode> {
    let wheel = if args.native {
        build_native(&Venv::ensure(&[Requirements::Base])?)?
    } else {
        build_portable(&Venv::ensure(&[Requirements::Base, Requirements::Wheel])?)?
    };
    let bytes = fs::metadata(&wheel)?.len();
    if args.json {
        println!("{}", serde_json::json!({ "path": wheel, "bytes": bytes }));
    } else {
        println!("{} ({:.1} MiB)", wheel.display(), bytes as f64 / f64::from(1 << 20));
    }
    Ok(ExitCode::SUCCESS)
}

fn build_native(venv: &Venv) -> Result<PathBuf> {
    build(venv, &workspace::root().join("target/wheels"), &["--compatibility", "linux"])
}

/// Builds the wheel for any Linux since manylinux2014 (glibc 2.17), with zig as the linker.
pub fn build_portable(venv: &Venv) -> Result<PathBuf> {
    build(venv, &workspace::root().join("dist"), &["--compatibility", "manylinux2014", "--zig"])
}

/// Builds the wheel for this machine and puts it into the environment. One command at a time does so: another would
/// take the wheel away before it is installed.
pub fn install_native(venv: &Venv) -> Result<PathBuf> {
    let lock = File::create(workspace::root().join("target/wheel.lock"))
        .context("cannot create the wheel's lock file")?;
    lock.lock().context("cannot lock the wheel")?;
    let wheel = build_native(venv)?;
    install(venv, &wheel)?;
    Ok(wheel)
}

/// Puts a wheel into the environment, in place of the one that is there.
pub fn install(venv: &Venv, wheel: &Path) -> Result<()> {
    process::run(
        venv.pip_install().args(["--quiet", "--no-index", "--no-deps", "--force-reinstall"]).arg(wheel),
    )
}

fn build(venv: &Venv, out: &Path, options: &[&str]) -> Result<PathBuf> {
    // What lies there from other versions would be taken for the one built now.
    for old in wheels_in(out)? {
        fs::remove_file(old)?;
    }
    let mut maturin = venv.command();
    maturin.args(["-m", "maturin", "build", "--release"]).args(workspace::locked()).args(options);
    maturin.arg("--interpreter").arg(venv.python()).arg("--out").arg(out);
    // Where maturin's --zig looks for the ziglang package.
    maturin.env("CARGO_ZIGBUILD_PYTHON_PATH", venv.python());
    process::run(&mut maturin)?;
    match wheels_in(out)?.as_slice() {
        [wheel] => Ok(wheel.clone()),
        others => bail!("maturin left {} wheels in {}, one was expected", others.len(), out.display()),
    }
}

/// The wheels of this project in a folder, which need not exist.
fn wheels_in(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let mut wheels = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if name.starts_with("weightstream-") && path.extension().is_some_and(|e| e == "whl") {
            wheels.push(path);
        }
    }
    Ok(wheels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_wheels_are_found() {
        let folder = tempfile::tempdir().unwrap();
        for name in [
            "weightstream-0.1.0-cp310-abi3-linux_x86_64.whl",
            "torch-2.11.0.whl",
            "weightstream-0.1.0.tar.gz",
        ] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let found = wheels_in(folder.path()).unwrap();
        assert_eq!(found.len(), 1);
        assert!(found[0].to_string_lossy().contains("abi3"));
        assert!(wheels_in(&folder.path().join("none")).unwrap().is_empty());
    }
}
