//! Any bytes as a safetensors file of quantized layers: detection never panics, puts every tensor in exactly one place, and describes
//! no weight whose numbers cannot be had from the file, but for an index of groups that names others than there are.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use checkpoint::safetensors::read_header;
use checkpoint::{Limits, TensorInfo};
use quant_router::detect::{Handlers, Header};
use quant_router::{QuantError, Target, dequantize};

/// Panics if anything is wrong.
pub(crate) fn run(data: &[u8]) {
    let limits = Limits::default();
    let Ok(file) = read_header(data, data.len() as u64, Path::new("fuzz"), &limits, false) else { return };
    let bytes = |tensor: &TensorInfo| &data[tensor.range.start as usize..tensor.range.end as usize];
    let read = |tensor: &TensorInfo| -> io::Result<Vec<u8>> { Ok(bytes(tensor).to_vec()) };
    let header = Header::new(&file.tensors, &file.metadata, &read);
    let Ok(detection) = Handlers::default().detect(&header) else { return };
    let mut places: Vec<&str> = detection.plain.iter().chain(&detection.hints).map(String::as_str).collect();
    let parts: BTreeMap<String, &[u8]> =
        file.tensors.iter().map(|tensor| (tensor.name.clone(), bytes(tensor))).collect();
    for (name, found) in &detection.weights {
        let weight = &found.weight;
        assert_eq!(*name, weight.name);
        places.extend(weight.parts.iter().map(|part| part.tensor.as_str()));
        let rows = weight.rows().unwrap_or_else(|error| panic!("{error}"));
        let elements = weight.elements().unwrap_or_else(|error| panic!("{error}"));
        assert!(elements <= 8 * data.len() as u64, "{name} is larger than its file can tell");
        let mut out = vec![0.0; elements as usize];
        match dequantize(weight, &parts, 0..rows, Target::F32(&mut out)) {
            // What an index holds is no header's.
            Ok(()) | Err(QuantError::NoSuchGroup { .. }) => {}
            Err(error) => panic!("{name} is described as {} and is none: {error}", weight.format),
        }
    }
    places.sort_unstable();
    let mut names: Vec<&str> = file.tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(places, names);
}
