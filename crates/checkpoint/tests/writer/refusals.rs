//! What is not written: anything that could not be read again, each with its reason.

use checkpoint::{TensorSpec, WriteOptions, Writer};
use safetensors::Dtype;

use crate::{names, plain};

fn spec(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
    TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec() }
}

/// What is said of these tensors; nothing may be left of them.
fn refusal(specs: Vec<TensorSpec>, options: &WriteOptions) -> String {
    let folder = tempfile::tempdir().unwrap();
    let error = Writer::create(&folder.path().join("model.safetensors"), specs, options).unwrap_err();
    assert_eq!(names(folder.path()), [""; 0]);
    let said = error.to_string();
    assert!(said.starts_with("cannot write ") && said.contains("model.safetensors: "), "{said}");
    said
}

#[test]
fn tensors_that_cannot_be_are_refused() {
    let w = |dtype, shape: &[u64]| vec![spec("w", dtype, shape)];
    for (specs, said) in [
        (vec![spec("w", Dtype::U8, &[1]), spec("w", Dtype::I8, &[1])], "two tensors are named \"w\""),
        (vec![spec("__metadata__", Dtype::U8, &[1])], "a tensor cannot be named `__metadata__`"),
        (
            w(Dtype::F32, &[1 << 40, 1 << 40]),
            "tensor \"w\" of type F32 and shape [1099511627776, 1099511627776]",
        ),
        (w(Dtype::F4, &[3]), "tensor \"w\" of type F4 and shape [3] has 12 bits, no whole number of bytes"),
        (w(Dtype::U8, &[1 << 60, 8]), "has more than 2^63 - 1 bytes"),
        (
            (0..5)
                .map(|n| spec(&n.to_string(), Dtype::U8, &[1 << 60]))
                .chain(w(Dtype::U8, &[1 << 60; 1]))
                .chain((5..9).map(|n| spec(&n.to_string(), Dtype::U8, &[1 << 60])))
                .collect(),
            "all tensors together have more than 2^63 - 1 bytes",
        ),
        (
            w(Dtype::U8, &[1; 65]),
            "it could not be read again with the default limits: tensor \"w\" has more than 64",
        ),
        (
            vec![spec(&"n".repeat(2000), Dtype::U8, &[1])],
            "it could not be read again with the default limits",
        ),
    ] {
        let found = refusal(specs, &plain(&[]));
        assert!(found.contains(said), "{said}: {found}");
    }
}

#[test]
fn alignments_that_are_none_are_refused() {
    for alignment in [0, 3, 4095, 2 << 20] {
        let options = WriteOptions { alignment, ..WriteOptions::default() };
        let found = refusal(Vec::new(), &options);
        assert!(
            found.ends_with(&format!(
                "an alignment of {alignment} bytes is no power of two from 1 to 1048576"
            ))
        );
    }
}

#[test]
fn bytes_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let specs = vec![spec("w", Dtype::U8, &[4])];
    let mut writer = Writer::create(&path, specs, &WriteOptions::default()).unwrap();
    let said = writer.write(1, &[]).unwrap_err().to_string();
    assert!(said.ends_with("there is no tensor 1: 1 were announced"), "{said}");
    writer.write(0, &[1; 3]).unwrap();
    let said = writer.write(0, &[1; 2]).unwrap_err().to_string();
    assert!(said.ends_with("tensor \"w\" has 4 bytes, and 5 were given"), "{said}");
    drop(writer);
    assert_eq!(names(folder.path()), [""; 0]);
}
