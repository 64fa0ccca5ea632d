//! Any bytes as a GGUF file: whatever is accepted has its tensors inside the file, each with its own bytes, as many as its
//! type and shape take, and its lists can be read.

use std::collections::BTreeSet;
use std::path::Path;

use checkpoint::gguf::{GgmlType, GgufHeader, MemorySource, read_header};
use checkpoint::{FileHeader, Limits};

/// Panics if anything is wrong.
pub(crate) fn run(data: &[u8]) {
    let source = MemorySource::new(Path::new("fuzz"), data);
    let limits = Limits::default();
    let strict = read_header(&source, 0, &limits, false);
    let Ok((header, gguf)) = read_header(&source, 0, &limits, true) else {
        assert!(strict.is_err(), "to allow more refuses nothing");
        return;
    };
    assert_eq!(strict.is_ok(), header.trailing == 0);
    check(data, &header, &gguf);
    for (key, value) in gguf.values() {
        let Some(list) = value.as_array() else { continue };
        if let Ok(elements) = gguf.elements(&source, key, &limits) {
            assert_eq!(elements.map(|elements| elements.len() as u64), Some(list.count));
        }
    }
    let mut tight = Limits::default();
    (tight.max_tensors, tight.max_rank, tight.max_name, tight.max_metadata) = (2, 2, 24, 16);
    if let Ok((header, gguf)) = read_header(&source, 0, &tight, true) {
        assert!(header.tensors.len() <= 2);
        // A true shape may have more dimensions than the stored one, and no more than allowed.
        assert!(header.tensors.iter().all(|t| t.shape.len() <= 2 && t.name.len() <= 24));
        assert!(gguf.values().keys().map(String::len).sum::<usize>() <= 16);
    }
}

/// What must hold of everything that is accepted, by arithmetic that cannot overflow.
fn check(data: &[u8], header: &FileHeader, gguf: &GgufHeader) {
    assert!(gguf.alignment.is_power_of_two() && header.data_start.is_multiple_of(gguf.alignment));
    let mut names = BTreeSet::new();
    let mut end = header.data_start;
    for tensor in &header.tensors {
        assert!(names.insert(&tensor.name), "{:?} twice", tensor.name);
        let range = &tensor.range;
        assert!(header.data_start <= range.start && range.start <= range.end);
        assert!(range.end <= data.len() as u64);
        assert!((range.start - header.data_start).is_multiple_of(gguf.alignment));
        let elements = |shape: &[u64]| shape.iter().map(|dim| u128::from(*dim)).product::<u128>();
        let stored = gguf.stored_shape(&tensor.name).unwrap_or(&tensor.shape);
        assert_eq!(elements(stored), elements(&tensor.shape));
        let kind = GgmlType::all().find(|kind| kind.name() == tensor.kind.to_string());
        let kind = kind.expect("every type has a name of its own");
        let (block, bytes) = (u128::from(kind.block_elements()), u128::from(kind.block_bytes()));
        assert_eq!(elements(stored) % block, 0);
        assert_eq!(u128::from(tensor.bytes()), elements(stored) / block * bytes);
        if tensor.bytes() > 0 {
            assert!(range.start >= end, "tensors overlap, or are not in the order of their bytes");
            end = range.end;
        }
    }
    assert!(header.trailing <= data.len() as u64);
}
