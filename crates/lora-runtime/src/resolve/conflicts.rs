//! Two adapters of one file on the same rows of a layer, where it is not said what both together would be.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::key::Role;
use crate::plan::{AdapterKind, AdapterPlan, AdapterTarget, Refused};

/// Refuses all keys of targets that are in each other's way, and takes the targets out.
pub(super) fn refuse(plan: &mut AdapterPlan) {
    let mut layers: BTreeMap<&str, Vec<&AdapterTarget>> = BTreeMap::new();
    for target in &plan.targets {
        layers.entry(&target.layer).or_default().push(target);
    }
    let mut refused: BTreeMap<String, String> = BTreeMap::new();
    for (layer, targets) in layers {
        for (number, a) in targets.iter().enumerate() {
            if let Some(b) = targets[number + 1..].iter().find(|b| clash(a, b)) {
                let first = |target: &AdapterTarget| target.keys().next().unwrap_or_default().to_owned();
                let reason = format!("{:?} and {:?} change the same rows of {layer:?}", first(a), first(b));
                refused.extend(a.keys().chain(b.keys()).map(|key| (key.to_owned(), reason.clone())));
            }
        }
    }
    drop_all(plan, refused);
}

/// Takes out every target that uses a refused key, and then refuses the keys that only it used.
fn drop_all(plan: &mut AdapterPlan, mut refused: BTreeMap<String, String>) {
    let mut open: BTreeSet<String> = refused.keys().cloned().collect();
    while !open.is_empty() {
        let (gone, kept): (Vec<_>, Vec<_>) = std::mem::take(&mut plan.targets)
            .into_iter()
            .partition(|target| target.keys().any(|key| open.contains(key)));
        plan.targets = kept;
        let mut next = BTreeSet::new();
        for target in &gone {
            let reason = target.keys().find_map(|key| refused.get(key)).cloned().unwrap_or_default();
            for key in target.keys() {
                if !refused.contains_key(key) {
                    refused.insert(key.to_owned(), reason.clone());
                    next.insert(key.to_owned());
                }
            }
        }
        open = next;
    }
    plan.refused.extend(refused.into_iter().map(|(key, reason)| Refused { key, reason }));
}

fn rows(target: &AdapterTarget) -> Range<u64> {
    target.rows.clone().unwrap_or(0..u64::MAX)
}

fn clash(a: &AdapterTarget, b: &AdapterTarget) -> bool {
    let (one, other) = (rows(a), rows(b));
    if one.start >= other.end || other.start >= one.end {
        return false;
    }
    let is = |kind: AdapterKind| (a.kind == kind, b.kind == kind);
    match (is(AdapterKind::DiffBias), is(AdapterKind::Diff)) {
        ((true, true), _) => true,
        ((true, false) | (false, true), _) => false,
        (_, (true, false)) => b.parts.contains_key(&Role::Magnitude),
        (_, (false, true)) => a.parts.contains_key(&Role::Magnitude),
        _ => true,
    }
}
