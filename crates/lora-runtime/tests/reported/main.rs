//! Files that users reported, each with its thread: tiny ones of the same shape, and every variant of them.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::float_cmp,
    clippy::single_range_in_vec_init,
    reason = "tests"
)]

#[path = "../common/mod.rs"]
mod common;

mod alpha;
mod dora;
mod fp8;
mod fused;
mod kronecker;
mod names;
mod whole;

use std::collections::BTreeMap;

use lora_runtime::reference::{Values, delta};
use lora_runtime::{AdapterTarget, Role};

/// Numbers of a tensor: any, but always the same ones for a part of a layer, however its key is spelled.
fn numbers(role: Role, count: usize) -> Vec<f64> {
    let seed = role as u64 as f64;
    (0..count).map(|at| ((at as f64 + 1.0) * (seed + 1.7)).sin()).collect()
}

/// The numbers of all parts of a target.
fn parts(target: &AdapterTarget) -> BTreeMap<Role, Vec<f64>> {
    let count = |shape: &[u64]| shape.iter().product::<u64>() as usize;
    target.parts.iter().map(|(role, part)| (*role, numbers(*role, count(&part.shape)))).collect()
}

/// As the reference takes them.
fn values(parts: &BTreeMap<Role, Vec<f64>>) -> Values<'_> {
    parts.iter().map(|(role, numbers)| (*role, numbers.as_slice())).collect()
}

/// The difference that a target makes with such numbers.
fn change(target: &AdapterTarget) -> Vec<f64> {
    delta(target, &values(&parts(target))).unwrap()
}

/// `scale · up · down` of such numbers, whole.
fn product(rows: usize, columns: usize, rank: usize, scale: f64) -> Vec<f64> {
    let (up, down) = (numbers(Role::Up, rows * rank), numbers(Role::Down, rank * columns));
    let at = |row: usize, column: usize| {
        (0..rank).map(|k| up[row * rank + k] * down[k * columns + column]).sum::<f64>()
    };
    (0..rows * columns).map(|n| scale * at(n / columns, n % columns)).collect()
}

fn close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    let worst = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(worst < 1e-9, "{worst}");
}

/// The orders in which a file's keys may come: as they are, backwards, and two that mix them.
fn orders<T: Clone>(list: &[T]) -> Vec<Vec<T>> {
    let mixed = |step: usize| {
        let mut places: Vec<_> = (0..list.len()).collect();
        places.sort_by_key(|place| (place * step) % 101);
        places.into_iter().map(|place| list[place].clone()).collect()
    };
    vec![list.to_vec(), list.iter().rev().cloned().collect(), mixed(37), mixed(53)]
}
