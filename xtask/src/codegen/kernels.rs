//! What a module of kernels is made from, and how it says so: options, a number over its sources, and the header of codebooks. Pure.

use std::fmt::Write as _;

use anyhow::{Context, Result};

/// Where kernels are.
pub const FOLDER: &str = "crates/quant-kernels/kernels";
/// The codebooks that a header is made from.
pub const GRIDS: &str = "crates/quant-router/src/ggml/tables/grids.rs";
/// What NVRTC is told, besides the oldest device; without fused multiplication numbers are those of the decoders.
pub const OPTIONS: &[&str] = &["--fmad=false", "--std=c++17", "--device-as-default-execution-space"];
/// The oldest device that a module is made for, unless its source says so in its first line, beginning with [`ARCHITECTURE`]: Turing.
pub const OLDEST: u32 = 75;
/// How that line begins; the number follows.
pub const ARCHITECTURE: &str = "// Architecture: compute_";
/// How a module's second line begins; the number follows.
pub const STAMP: &str = "// Sources and options: ";

/// The oldest device that a source is compiled for.
pub fn oldest(source: &str) -> u32 {
    let named = source.lines().next().and_then(|line| line.strip_prefix(ARCHITECTURE));
    named.and_then(|number| number.trim().parse().ok()).unwrap_or(OLDEST)
}

/// What names that device to NVRTC.
pub fn architecture(oldest: u32) -> String {
    format!("--gpu-architecture=compute_{oldest}")
}

/// A number over all that a module is made from: FNV-1a of the texts, each with its length. It is there to notice changes.
pub fn digest<'a>(source: &str, headers: impl Iterator<Item = &'a str>) -> u64 {
    let mut digest = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |bytes: &[u8]| {
        for byte in bytes {
            digest = (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    let first = architecture(oldest(source));
    let mut text = |text: &str| {
        add(&(text.len() as u64).to_le_bytes());
        add(text.as_bytes());
    };
    text(&first);
    OPTIONS.iter().copied().for_each(&mut text);
    text(source);
    headers.for_each(text);
    digest
}

/// A module as it is kept: where it is from, then what was compiled, without white space at the ends of lines.
pub fn module(source: &str, digest: u64, compiled: &str) -> String {
    let mut text =
        format!("// Written by `cargo xtask codegen` from {source}; do not edit.\n{STAMP}{digest:016x}\n");
    for line in compiled.trim().lines() {
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// The codebooks as a header: each constant of the Rust file becomes a table of the same numbers.
pub fn header(grids: &str) -> Result<String> {
    let mut text = String::from(
        "// Codebooks of ggml's IQ types, written by `cargo xtask codegen` from those of quant-router; do not edit.\n//\n\
         // A number is a vector. Its fields, lowest bits first, are indexes into the list of values that the type has: eight fields \
         of two\n// bits, or four of four bits.\n#pragma once\n#include \"device.cuh\"\n",
    );
    let mut about = "";
    let mut lines = grids.lines();
    while let Some(line) = lines.next() {
        if let Some(comment) = line.strip_prefix("/// ") {
            about = comment;
        }
        let Some(constant) = line.strip_prefix("pub(super) const ") else { continue };
        let parts =
            constant.split_once(": [u16; ").and_then(|(name, rest)| Some((name, rest.split_once(']')?.0)));
        let (name, count) = parts.with_context(|| format!("{line:?} is no codebook"))?;
        let _ = write!(text, "\n// {about}\nTABLE u16 GRID_{name}[{count}] = {{\n");
        for numbers in lines.by_ref().take_while(|line| *line != "];") {
            let _ = writeln!(text, "{numbers}");
        }
        text.push_str("};\n");
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_says_what_it_is_from() {
        let number = digest("a", ["b"].into_iter());
        assert_ne!(number, digest("ab", [""].into_iter()));
        assert_ne!(number, digest("a", ["c"].into_iter()));
        assert_eq!(
            module("a.cu", 7, "\n.version 8.7  \n.target sm_75\t\n\n"),
            "// Written by `cargo xtask codegen` from a.cu; do not edit.\n// Sources and options: 0000000000000007\n\
             .version 8.7\n.target sm_75\n"
        );
    }

    #[test]
    fn a_source_may_name_a_newer_device() {
        assert_eq!(oldest("// Text.\n// Architecture: compute_80\n"), 75);
        assert_eq!(oldest("// Architecture: compute_80\n// Text.\n"), 80);
        assert_eq!(architecture(80), "--gpu-architecture=compute_80");
    }

    #[test]
    fn codebooks_become_tables() {
        let rust = "//! Text.\n\n/// Two vectors.\n#[rustfmt::skip]\npub(super) const A: [u16; 2] = [\n    0x0000, 0x0002,\n];\n";
        let header = header(rust).unwrap();
        assert!(
            header.ends_with("\n// Two vectors.\nTABLE u16 GRID_A[2] = {\n    0x0000, 0x0002,\n};\n"),
            "{header}"
        );
        assert!(super::header("pub(super) const A: u8 = 1;\n").is_err());
    }
}
