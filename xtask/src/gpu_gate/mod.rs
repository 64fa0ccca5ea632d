//! `gpu-gate`: the tests that need an NVIDIA GPU. It gathers them in a folder that needs neither Rust nor a network,
//! and runs that folder's `run.py` here, or leaves it to be carried to another machine (`--bundle`).

mod bundle;

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};

use crate::python::{Requirements, Venv};
use crate::{process, wheel, workspace};

/// Where to run the tests.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Write the folder here and run nothing. It runs with `python3 DIR/run.py` on a machine with Python and PyTorch.
    #[arg(long, value_name = "DIR")]
    bundle: Option<PathBuf>,
    /// Build the bundle's wheel for this machine only, without zig.
    #[arg(long)]
    native: bool,
    /// Put the packages of these other libraries into the bundle, for `run.py bench stream`.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    peers: Vec<String>,
    /// The Python version of the GPU machine, which packages with native code must match.
    #[arg(long, value_name = "X.Y", default_value = "3.12")]
    python: String,
    /// Print one JSON object as the last line.
    #[arg(long)]
    json: bool,
}

/// Builds the folder, and runs it unless it is to be carried away.
///
/// Exit status: 0 all passed, 1 some failed or did not run, 3 no usable GPU.
pub fn run(args: &Args) -> Result<ExitCode> {
    let portable = args.bundle.is_some() && !args.native;
    let sets: &[_] =
        if portable { &[Requirements::Base, Requirements::Wheel] } else { &[Requirements::Base] };
    let venv = Venv::ensure(sets)?;
    let wheel = if portable {
        let wheel = wheel::build_portable(&venv)?;
        wheel::install(&venv, &wheel)?;
        wheel
    } else {
        wheel::install_native(&venv)?
    };
    if let Some(folder) = &args.bundle {
        let summary = bundle::write(
            folder,
            &venv,
            &wheel,
            &bundle::Peers { names: &args.peers, python: &args.python },
        )?;
        if args.json {
            println!("{}", serde_json::to_string(&summary)?);
        } else {
            println!("{summary}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let folder = workspace::root().join("target/gpu-gate");
    bundle::write(&folder, &venv, &wheel, &bundle::Peers { names: &[], python: &args.python })?;
    let mut python = Command::new(venv.python());
    python.arg(folder.join("run.py"));
    if args.json {
        python.arg("--json");
    }
    let code = process::status(&mut python)?.code().context("run.py was killed")?;
    Ok(ExitCode::from(u8::try_from(code).unwrap_or(1)))
}
