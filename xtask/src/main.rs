//! Entry point of the project's commands: `cargo xtask <command>`. It only dispatches; each command is one module.

mod bench;
mod codegen;
mod demo;
mod fuzz;
mod gpu_gate;
mod process;
mod python;
mod test;
mod tidy;
mod wheel;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The project's commands. All of them set up what they need.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a real model resident and streamed through a memory budget, and compare the two.
    Demo(demo::Args),
    /// Run every check: format, clippy, tidy, Rust tests, doc tests, Python lint, the wheel, and pytest on it.
    Test(test::Args),
    /// Build and run the tests that need an NVIDIA GPU, here or on another machine.
    GpuGate(gpu_gate::Args),
    /// Measure: `stream` on a GPU, `plan` on this CPU.
    Bench(bench::Args),
    /// Write what is generated (codebooks, and kernels as PTX), or check that it is in sync.
    Codegen(codegen::Args),
    /// Look for inputs on which a parser of untrusted files fails (needs nightly and cargo-fuzz).
    Fuzz(fuzz::Args),
    /// Check the rules of the repository that no compiler checks.
    Tidy(tidy::Args),
    /// Build the Python wheel.
    Wheel(wheel::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Demo(args) => demo::run(&args),
        Command::Test(args) => Ok(test::run(&args)),
        Command::GpuGate(args) => gpu_gate::run(&args),
        Command::Bench(args) => bench::run(&args),
        Command::Codegen(args) => codegen::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        Command::Tidy(args) => tidy::run(&args),
        Command::Wheel(args) => wheel::run(&args),
    };
    match outcome {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
