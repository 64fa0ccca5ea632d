//! What several test files share: building safetensors files from text, with no help from the code under test.
#![allow(dead_code, clippy::unwrap_used, clippy::panic, reason = "tests; not every file uses every helper")]

use std::fmt::Write as _;
use std::path::Path;

use checkpoint::safetensors::{HeaderProblem, read_header};
use checkpoint::{CheckpointError, FileHeader, Limits};

/// A file with this header and these bytes of data.
pub(crate) fn file(header: impl AsRef<[u8]>, data: &[u8]) -> Vec<u8> {
    let header = header.as_ref();
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

/// The entry of one tensor.
pub(crate) fn entry(name: &str, dtype: &str, shape: &[u64], start: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
}

/// A whole file of tensors that follow one another, with bytes that count up.
pub(crate) fn model(tensors: &[(&str, &str, &[u64], u64)], metadata: &[(&str, &str)]) -> Vec<u8> {
    let mut entries = Vec::new();
    if !metadata.is_empty() {
        let pairs: Vec<_> = metadata.iter().map(|(key, value)| format!("{key:?}:{value:?}")).collect();
        entries.push(format!("\"__metadata__\":{{{}}}", pairs.join(",")));
    }
    let mut end = 0;
    for (name, dtype, shape, bytes) in tensors {
        entries.push(entry(name, dtype, shape, end, end + bytes));
        end += bytes;
    }
    let mut header = String::new();
    write!(header, "{{{}}}", entries.join(",")).unwrap();
    let data: Vec<u8> = (0..end).map(|byte| (byte % 251) as u8).collect();
    file(header, &data)
}

/// Reads a header strictly, within the default limits.
pub(crate) fn read(bytes: &[u8]) -> Result<FileHeader, CheckpointError> {
    read_within(bytes, &Limits::default())
}

/// Reads a header strictly.
pub(crate) fn read_within(bytes: &[u8], limits: &Limits) -> Result<FileHeader, CheckpointError> {
    read_header(bytes, bytes.len() as u64, Path::new("model.safetensors"), limits, false)
}

/// What is wrong with a file.
pub(crate) fn problem(bytes: &[u8]) -> HeaderProblem {
    match read(bytes) {
        Err(CheckpointError::Header { problem, .. }) => *problem,
        other => panic!("no problem of a header: {other:?}"),
    }
}
