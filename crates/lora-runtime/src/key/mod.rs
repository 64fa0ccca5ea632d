//! A key of an adapter file, taken apart: which layer it speaks of, and what part of that layer's adapter the tensor is.

mod role;

pub use role::Role;

/// A key that ends as adapters' keys do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdapterKey<'a> {
    /// The layer, as the file spells it, wrappers included.
    pub layer: &'a str,
    /// What the tensor is.
    pub role: Role,
    /// The name of the adapter, where the key has one.
    pub word: Option<&'a str>,
}

/// Why a key is none of an adapter that is applied, as the end of a sentence about it.
pub(crate) type Unknown = &'static str;

/// What stands behind an ending and is no adapter's name: a scale beside a factor would change its numbers.
const NO_WORDS: &[&str] = &[
    "weight",
    "bias",
    "weight_scale",
    "weight_scale_2",
    "scale_weight",
    "input_scale",
    "scale_input",
    "scale",
    "scales",
    "absmax",
    "quant_map",
    "comfy_quant",
];

/// Takes a key apart, from its end.
pub fn parse_key(key: &str) -> Result<AdapterKey<'_>, &'static str> {
    if let Some(found) = plain(key) {
        return found;
    }
    let (body, tail) = match key.rsplit_once('.') {
        Some((body, "weight")) => (body, Tail::Weight),
        Some((body, "bias")) => (body, Tail::Bias),
        _ => (key, Tail::None),
    };
    let found = low_rank(body).or_else(|| {
        let (body, word) = body.rsplit_once('.')?;
        let (layer, role) = low_rank(body)?;
        Some((layer, role, Some(word)))
            .filter(|_| !word.is_empty() && !NO_WORDS.contains(&word))
            .map(|(layer, role, _)| (layer, role))
    });
    let Some((layer, role)) = found else {
        return Err(two_words(body).unwrap_or("its ending is none of an adapter's"));
    };
    let word = low_rank(body).is_none().then(|| body.rsplit_once('.').map(|(_, word)| word)).flatten();
    if layer.is_empty() {
        return Err("it names no layer");
    }
    let role = match (tail, role) {
        (Tail::Bias, Role::Up) => Role::UpBias,
        (Tail::Bias, _) => return Err("only the upper factor of an adapter has a bias"),
        (_, role) => role,
    };
    Ok(AdapterKey { layer, role, word })
}

#[derive(Clone, Copy)]
enum Tail {
    None,
    Weight,
    Bias,
}

/// Endings that take no adapter name and no `.weight`.
fn plain(key: &str) -> Option<Result<AdapterKey<'_>, Unknown>> {
    let (layer, ending) = key.rsplit_once('.')?;
    let role = match ending {
        "alpha" | "lora_alpha" => Role::Alpha,
        "diff" | "w_norm" => Role::Diff,
        "diff_b" | "b_norm" => Role::DiffBias,
        "diff_m" => Role::DiffModulation,
        "set_weight" | "set_bias" => {
            return Some(Err("it replaces a weight instead of changing it, which is not done"));
        }
        "reshape_weight" => return Some(Err("it gives a weight another shape, which is not done")),
        _ => return None,
    };
    if layer.is_empty() {
        return Some(Err("it names no layer"));
    }
    Some(Ok(AdapterKey { layer, role, word: None }))
}

/// The layer and the role of a key that ends in one, without `.weight` and adapter name.
fn low_rank(body: &str) -> Option<(&str, Role)> {
    let (layer, last) = body.rsplit_once('.').unwrap_or(("", body));
    if let Some(role) = Role::of_segment(last) {
        return Some((layer, role));
    }
    let role = match last {
        "down" | "A" => Role::Down,
        "up" | "B" => Role::Up,
        "mid" => Role::Mid,
        _ => return None,
    };
    let (layer, before) = layer.rsplit_once('.').unwrap_or(("", layer));
    if before == "lora" || before == "lora_linear_layer" {
        return Some((layer, role));
    }
    // `to_q_lora.down`: the layer's own name ends in front of `_lora`.
    before.strip_suffix("_lora").filter(|name| !name.is_empty())?;
    let end = body.len() - last.len() - ".".len() - "_lora".len();
    Some((&body[..end], role))
}

/// What is said of a key with two adapter names, and of endings that are known and not applied.
fn two_words(body: &str) -> Option<Unknown> {
    let mut parts = body.rsplit('.');
    if let Some(unapplied) = parts.clone().find_map(Role::unapplied) {
        return Some(unapplied);
    }
    if parts.clone().any(|part| NO_WORDS.contains(&part)) {
        return None;
    }
    parts
        .find(|part| Role::of_segment(part).is_some())
        .map(|_| "it has more than one adapter name behind its ending")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    fn taken(key: &str) -> (String, Role, Option<&str>) {
        let key = parse_key(key).unwrap();
        (key.layer.to_owned(), key.role, key.word)
    }

    #[test]
    fn every_ending_is_known() {
        let cases: &[(&str, Role)] = &[
            ("lora_A.weight", Role::Down),
            ("lora_A", Role::Down),
            ("lora_down.weight", Role::Down),
            ("lora.down.weight", Role::Down),
            ("lora.A.weight", Role::Down),
            ("lora_linear_layer.down.weight", Role::Down),
            ("lora_B.weight", Role::Up),
            ("lora_up", Role::Up),
            ("lora.up.weight", Role::Up),
            ("lora.B", Role::Up),
            ("lora_mid.weight", Role::Mid),
            ("lora_B.bias", Role::UpBias),
            ("alpha", Role::Alpha),
            ("diff", Role::Diff),
            ("w_norm", Role::Diff),
            ("diff_b", Role::DiffBias),
            ("b_norm", Role::DiffBias),
            ("diff_m", Role::DiffModulation),
            ("dora_scale", Role::Magnitude),
            ("lora_magnitude_vector", Role::Magnitude),
            ("lora_magnitude_vector.weight", Role::Magnitude),
            ("lokr_w1", Role::W1),
            ("lokr_w2_a", Role::W2A),
            ("lokr_t2", Role::T2),
            ("hada_w1_b", Role::HadaW1B),
            ("hada_t1", Role::HadaT1),
            ("oft_blocks", Role::Blocks),
            ("oft_diag", Role::Rotations),
            ("rescale", Role::Rescale),
            ("oft_R.weight", Role::PackedBlocks),
            ("oft_r", Role::HalfBlocks),
            ("oft_s", Role::Gain),
            ("boft_R", Role::HalfBlocks),
            ("boft_s", Role::Gain),
            ("ia3_l", Role::Scales),
            ("lora_embedding_A", Role::EmbeddingA),
            ("lora_embedding_B", Role::EmbeddingB),
            ("oft_embedding_R.weight", Role::EmbeddingBlocks),
            ("a1.weight", Role::InputUp),
            ("a2.weight", Role::InputDown),
            ("b1.weight", Role::Up),
            ("b2.weight", Role::Down),
        ];
        for (ending, role) in cases {
            assert_eq!(
                taken(&format!("blocks.0.q.{ending}")),
                ("blocks.0.q".into(), *role, None),
                "{ending}"
            );
        }
        assert_eq!(
            taken("attn1.processor.to_q_lora.down.weight"),
            ("attn1.processor.to_q".into(), Role::Down, None)
        );
    }

    #[test]
    fn one_adapter_name_is_taken_off_whatever_it_is() {
        for word in ["default", "default_0", "my-style", "B"] {
            assert_eq!(taken(&format!("a.q.lora_A.{word}.weight")), ("a.q".into(), Role::Down, Some(word)));
            assert_eq!(taken(&format!("a.q.lora_B.{word}.bias")), ("a.q".into(), Role::UpBias, Some(word)));
            assert_eq!(taken(&format!("a.q.hada_w1_a.{word}")), ("a.q".into(), Role::HadaW1A, Some(word)));
        }
        let two = parse_key("a.q.lora_A.default_0.default.weight").unwrap_err();
        assert_eq!(two, "it has more than one adapter name behind its ending");
    }

    #[test]
    fn what_is_not_applied_says_why() {
        assert!(parse_key("a.set_weight").unwrap_err().contains("replaces"));
        assert!(parse_key("a.on_input").unwrap_err().contains("LyCORIS"));
        assert!(parse_key("a.lora_A.bias").unwrap_err().contains("upper factor"));
        assert!(parse_key("a.weight").unwrap_err().contains("none of an adapter's"));
        for key in ["", ".", "lora_A.weight", ".alpha", "_lora.down.weight", "alpha"] {
            assert!(parse_key(key).is_err(), "{key}");
        }
    }
}
