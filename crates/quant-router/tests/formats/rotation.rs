//! Rotated weights: what a rotated input meets, and the weight turned back.

use quant_router::formats::rotate;
use quant_router::{Target, Transform, dequantize};

use super::{corpus, open};

#[test]
fn rotated_inputs_give_what_the_unrotated_weight_gives() {
    let file = open(&corpus().join("rotation.safetensors"));
    assert_eq!(file.detection.weights.len(), 4);
    for (name, found) in &file.detection.weights {
        let weight = &found.weight;
        let &[Transform::Hadamard { group }] = &weight.transforms[..] else { panic!("{name}") };
        assert_eq!(*name, format!("group{group}.weight"));
        let (rows, columns) = (6, 512);
        assert_eq!(weight.shape, [rows as u64, columns as u64]);
        let original = file.expected(name);
        let mut numbers = vec![0.0; original.len()];
        dequantize(weight, &file.bytes, 0..6, Target::F32(&mut numbers)).unwrap();
        let input: Vec<f32> = (0..columns).map(|i| ((i * 29 + 7) % 83) as f32 / 41.0 - 1.0).collect();
        let mut turned = input.clone();
        rotate(&mut turned, group);
        let length = |values: &[f32]| values.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>().sqrt();
        for row in 0..rows {
            let range = row * columns..(row + 1) * columns;
            let dot = |a: &[f32], b: &[f32]| {
                a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>()
            };
            let (have, want) = (dot(&turned, &numbers[range.clone()]), dot(&input, &original[range.clone()]));
            // Half a step of INT8 in every column, in random directions.
            let bound = length(&input) * length(&original[range.clone()]) * 0.02;
            assert!((have - want).abs() < bound, "{name} {row}: {have} {want}");
            let mut back = numbers[range.clone()].to_vec();
            rotate(&mut back, group);
            let off: Vec<f32> = back.iter().zip(&original[range]).map(|(a, b)| a - b).collect();
            assert!(length(&off) < 0.02 * length(&back), "{name} {row}");
        }
    }
}
