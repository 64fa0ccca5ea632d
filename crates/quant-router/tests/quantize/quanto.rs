//! The file of `corpus/quantize`, which its `make.py` writes with optimum-quanto.

use std::collections::BTreeMap;
use std::path::Path;

use checkpoint::{Checkpoint, OpenOptions, TensorInfo};
use quant_router::formats::Number;
use quant_router::{PartRole, QuantKind};

use super::quantize;

/// Whether two parts are the same numbers; which one a NaN is, is left open.
fn same(kind: &str, one: &[u8], other: &[u8]) -> bool {
    let number = match kind {
        "F32" => Number::F32,
        "F16" => Number::F16,
        "BF16" => Number::Bf16,
        "F8_E4M3" => Number::E4m3,
        "F8_E5M2" => Number::E5m2,
        _ => return one == other,
    };
    let nan = |bytes: &[u8]| number.at(bytes, 0).is_nan();
    let pairs = one.chunks(number.bytes()).zip(other.chunks(number.bytes()));
    one.len() == other.len() && pairs.into_iter().all(|(one, other)| one == other || nan(one) && nan(other))
}

#[test]
fn weights_are_those_of_quanto() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/quantize/quanto.safetensors");
    let model = Checkpoint::open(&path, &OpenOptions::default()).unwrap();
    let tensors: BTreeMap<&str, &TensorInfo> =
        model.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let read = |tensor: &TensorInfo| {
        let mut bytes = vec![0; tensor.bytes() as usize];
        model.files()[tensor.file].read_exact_at(tensor.range.start, &mut bytes).unwrap();
        bytes
    };
    let (mut compared, mut kinds) = (0, BTreeMap::new());
    for (name, weight) in &tensors {
        let Some(case) = name.strip_prefix("in.") else { continue };
        let number = Number::of(weight.kind).unwrap();
        let source = read(weight);
        for kind in QuantKind::ALL {
            let expected =
                |part: &str| tensors.get(format!("{}.{case}.{part}", kind.name()).as_str()).copied();
            let Some(scale) = expected("_scale") else {
                assert!(kind.bits() < 8 && weight.shape[0] == 1, "{kind} {case}");
                continue;
            };
            let (quantizer, parts) = quantize(&weight.shape, number, kind, &source);
            let roles = [
                (PartRole::Data, expected("_data").or_else(|| expected("_data._data")).unwrap(), &parts.data),
                (PartRole::Scale, scale, &parts.scale),
            ];
            let shift = expected("_shift").map(|shift| (PartRole::ZeroPoint, shift, &parts.shift));
            for (role, tensor, bytes) in roles.into_iter().chain(shift) {
                let part = quantizer.weight().part(role).unwrap();
                assert_eq!((part.kind, &part.shape), (tensor.kind, &tensor.shape), "{kind} {case} {role}");
                let ending = tensor.name.strip_prefix(&format!("{}.{case}.", kind.name())).unwrap();
                assert_eq!(part.tensor, format!("layer.weight.{ending}"));
                let expected = read(tensor);
                let differ = bytes.iter().zip(&expected).position(|(one, other)| one != other);
                assert!(
                    same(&tensor.kind.to_string(), bytes, &expected),
                    "{kind} {case} {role} at {differ:?}"
                );
                compared += 1;
            }
            *kinds.entry((kind.name(), weight.kind.to_string())).or_insert(0) += 1;
        }
    }
    assert_eq!(kinds.len(), 15, "{kinds:?}");
    assert!(kinds.values().all(|&cases| cases >= 13), "{kinds:?}");
    assert!(compared > 400, "{compared}");
}
