//! Names against a naive model: a spelling means whichever layers have the same letters and digits in the same groups, with any of
//! the known prefixes in front.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

mod common;

use std::collections::BTreeSet;

use common::{File, linear};
use lora_runtime::Layers;
use proptest::prelude::*;

/// Words that no table of fused layers and no prefix has.
const WORDS: &[&str] = &["blocks", "attn", "x", "y", "1", "10", "0", "11", "1x"];
const PREFIXES: &[&str] = &["", "diffusion_model.", "lora_unet_", "base_model.model.", "lycoris_", "model."];

fn name() -> impl Strategy<Value = Vec<(&'static str, char)>> {
    let word = (proptest::sample::select(WORDS), proptest::sample::select(&['.', '_', '-'][..]));
    proptest::collection::vec(word, 1..5)
}

fn joined(words: &[(&str, char)]) -> String {
    let mut text = String::new();
    for (number, (word, joint)) in words.iter().enumerate() {
        text.extend((number > 0).then_some(*joint));
        text.push_str(word);
    }
    text
}

/// The groups of letters and digits of a name, found letter by letter.
fn groups(name: &str) -> Vec<String> {
    let mut found = vec![String::new()];
    for c in name.chars() {
        if c.is_alphanumeric() {
            found.last_mut().unwrap().push(c);
        } else if !found.last().unwrap().is_empty() {
            found.push(String::new());
        }
    }
    found.retain(|group| !group.is_empty());
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_name_is_looked_up_by_its_letters_and_digits(
        names in proptest::collection::vec(name(), 1..8),
        asked in name(),
        from in proptest::option::of((any::<prop::sample::Index>(), proptest::collection::vec(any::<bool>(), 8))),
        prefix in proptest::sample::select(PREFIXES),
        backwards in any::<bool>(),
    ) {
        let layers: BTreeSet<String> = names.iter().map(|words| joined(words)).collect();
        let model = Layers::new(layers.iter().map(|name| linear(name, 8, 8))).unwrap();
        // Half of the time it is one of the layers, with other separators.
        let asked = from.map_or_else(|| joined(&asked), |(index, dots)| {
            let words = index.get(&names).iter().enumerate();
            let words: Vec<_> = words.map(|(n, (word, _))| (*word, if dots[n % 8] { '.' } else { '_' })).collect();
            joined(&words)
        });
        let mut file = File::default().peft(&format!("{prefix}{asked}"), 8, 8, 2);
        if backwards {
            file.tensors.reverse();
        }
        let plan = file.plan(&model);

        let same: Vec<_> = layers.iter().filter(|name| groups(name) == groups(&asked)).collect();
        let spelled: Vec<_> = layers.iter().filter(|name| **name == asked).collect();
        match (&same[..], &spelled[..]) {
            ([], _) => prop_assert_eq!((plan.targets.len(), plan.refused.len()), (0, 0), "{}", plan.report()),
            ([one], _) | (_, [one]) => {
                prop_assert_eq!(plan.targets.len(), 1, "{}", plan.report());
                prop_assert_eq!(&plan.targets[0].layer, *one);
            }
            _ => {
                prop_assert_eq!((plan.targets.len(), plan.refused.len()), (0, 2), "{}", plan.report());
                prop_assert!(plan.refused[0].reason.contains("could be"));
            }
        }
    }
}
