//! The files of `corpus/formats`, which its `make.py` writes: every weight of every file equals the numbers beside it, which
//! independent code computed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests")]

mod compare;
mod rotation;
mod targets;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use checkpoint::{Checkpoint, OpenOptions, TensorInfo};
use quant_router::detect::{Detection, Handlers, Header};

/// A file of the corpus: what was detected, and the bytes of all tensors.
struct File {
    detection: Detection,
    bytes: BTreeMap<String, Vec<u8>>,
    ulps: u32,
}

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/formats")
}

fn open(path: &Path) -> File {
    let model = Checkpoint::open(path, &OpenOptions::default()).unwrap();
    let read = |tensor: &TensorInfo| {
        let mut bytes = vec![0; tensor.bytes() as usize];
        model.files()[tensor.file].read_exact_at(tensor.range.start, &mut bytes).unwrap();
        Ok(bytes)
    };
    let given = model.tensors().iter().filter(|tensor| !tensor.name.starts_with("expected."));
    let detection = Handlers::default().detect(&Header::new(given, model.metadata(), &read)).unwrap();
    let bytes = model.tensors().iter().map(|tensor| (tensor.name.clone(), read(tensor).unwrap())).collect();
    File { detection, bytes, ulps: model.metadata()["ulps"].parse().unwrap() }
}

impl File {
    fn expected(&self, weight: &str) -> Vec<f32> {
        let bytes = &self.bytes[&format!("expected.{weight}")];
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }
}
