//! Any bytes as a safetensors file, read by us and by the official library: we never accept what it refuses, see the same
//! tensors in what both accept, and refuse more only for a reason on the list in the crate's README.

use std::collections::BTreeMap;
use std::path::Path;

use checkpoint::safetensors::{HeaderProblem, read_header};
use checkpoint::{CheckpointError, FileHeader, Limits, TensorType};
use safetensors::SafeTensors;
use safetensors::tensor::Metadata;

/// Panics if anything is wrong.
pub(crate) fn run(data: &[u8]) {
    let read = |limits: &Limits, lax| read_header(data, data.len() as u64, Path::new("fuzz"), limits, lax);
    let limits = Limits::default();
    match (read(&limits, false), SafeTensors::read_metadata(data)) {
        (Ok(ours), Ok((length, theirs))) => agree(&ours, length as u64, &theirs),
        (Ok(ours), Err(error)) => panic!("the official library refuses it, {error}, and we read {ours:?}"),
        (Err(error), Ok(_)) => {
            assert!(is_listed(&error), "the official library reads it, and we do not: {error}");
        }
        (Err(_), Err(_)) => {}
    }
    // What is allowed at the end changes nothing else.
    if let Ok(lax) = read(&limits, true) {
        let end = lax.tensors.last().map_or(lax.data_start, |tensor| tensor.range.end);
        assert_eq!(end + lax.trailing, data.len() as u64);
        let whole = &data[..end as usize];
        let strict = read_header(whole, end, Path::new("fuzz"), &limits, false);
        assert!(strict.is_ok_and(|strict| strict.tensors == lax.tensors));
    }
    let mut tight = Limits::default();
    (tight.max_tensors, tight.max_rank, tight.max_name, tight.max_metadata) = (2, 2, 8, 16);
    if let Ok(tight) = read(&tight, false) {
        assert!(
            tight.tensors.len() <= 2 && tight.tensors.iter().all(|t| t.shape.len() <= 2 && t.name.len() <= 8)
        );
    }
}

fn agree(ours: &FileHeader, length: u64, theirs: &Metadata) {
    assert_eq!(ours.data_start, 8 + length);
    assert_eq!(ours.trailing, 0);
    let tensors = theirs.tensors();
    assert_eq!(ours.tensors.len(), tensors.len());
    for tensor in &ours.tensors {
        let other = tensors[&tensor.name];
        assert_eq!(tensor.kind, TensorType::Plain(other.dtype));
        assert!(tensor.shape.iter().copied().eq(other.shape.iter().map(|dimension| *dimension as u64)));
        let (start, end) = other.data_offsets;
        assert_eq!(tensor.range, ours.data_start + start as u64..ours.data_start + end as u64);
    }
    let metadata: BTreeMap<_, _> = theirs.metadata().clone().unwrap_or_default().into_iter().collect();
    assert_eq!(ours.metadata, metadata);
}

/// Whether this is one of the refusals that we have beyond the official library's.
fn is_listed(error: &CheckpointError) -> bool {
    let CheckpointError::Header { problem, .. } = error else { return false };
    match problem.as_ref() {
        HeaderProblem::DuplicateTensor { .. }
        | HeaderProblem::DuplicateKey { .. }
        | HeaderProblem::OutOfProportion { .. }
        | HeaderProblem::Limit { .. }
        | HeaderProblem::Rank { .. }
        | HeaderProblem::Dimension { .. }
        // Descriptions as lists, and types as objects: serde reads both.
        | HeaderProblem::TensorKind { .. }
        | HeaderProblem::FieldKind { field: "dtype", .. } => true,
        HeaderProblem::Syntax { what, .. } => *what == "ends a number beyond 1e300",
        _ => false,
    }
}
