//! All numbers of all weights, bit for bit where the reference defines bits.

use quant_router::{QuantWeight, Target, dequantize};

use super::{corpus, open};

/// Whether two numbers are the same, up to so many steps of f32. All that are no numbers are alike.
fn same(have: f32, want: f32, ulps: u32) -> bool {
    if have.is_nan() || want.is_nan() {
        return have.is_nan() && want.is_nan();
    }
    // Zero and its negative are one place of this line, which has a step for every f32.
    let place = |number: f32| {
        let bits = i64::from(number.to_bits() & 0x7fff_ffff);
        if number.is_sign_negative() { -bits } else { bits }
    };
    place(have).abs_diff(place(want)) <= u64::from(ulps)
}

#[test]
fn every_weight_equals_its_reference() {
    let mut weights = 0;
    for entry in std::fs::read_dir(corpus()).unwrap() {
        let path = entry.unwrap().path();
        // Rotated weights meet rotated inputs; they have a test of their own.
        if path.extension().is_none_or(|ending| ending != "safetensors")
            || path.ends_with("rotation.safetensors")
        {
            continue;
        }
        let file = open(&path);
        let expected = file.bytes.keys().filter(|name| name.starts_with("expected.")).count();
        assert_eq!(file.detection.weights.len(), expected, "{}", path.display());
        for (name, found) in &file.detection.weights {
            let want = file.expected(name);
            let weight = &found.weight;
            // A description survives as text.
            let text = serde_json::to_string(weight).unwrap();
            assert_eq!(serde_json::from_str::<QuantWeight>(&text).unwrap(), *weight, "{text}");
            assert_eq!(weight.elements().unwrap(), want.len() as u64, "{name}");
            let mut have = vec![f32::NAN; want.len()];
            let rows = weight.rows().unwrap();
            dequantize(weight, &file.bytes, 0..rows, Target::F32(&mut have)).unwrap();
            for (at, (&have, &want)) in have.iter().zip(&want).enumerate() {
                assert!(same(have, want, file.ulps), "{}: {name} at {at}: {have:e} {want:e}", path.display());
            }
            weights += 1;
        }
    }
    assert!(weights > 120, "{weights}");
}
