//! How files spell the names of layers: with dots or underscores, behind the wrappers of a dozen trainers.

use std::borrow::Cow;

mod prefix;

pub(crate) use prefix::{Family, Stripped, strip, unwrapped};

/// What PyTorch's own wrappers put into the middle of names.
const WITHIN: [&str; 3] = ["_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."];

/// The letters and digits of a name, with one `_` wherever there was anything else between them, less PyTorch's own wrappers.
pub(crate) fn flatten(name: &str) -> String {
    let within = WITHIN.iter().filter(|word| name.contains(*word));
    let name = within.fold(Cow::Borrowed(name), |name, word| Cow::Owned(name.replace(word, "")));
    let mut flat = String::with_capacity(name.len());
    for part in name.split(|c: char| !c.is_alphanumeric()).filter(|part| !part.is_empty()) {
        if !flat.is_empty() {
            flat.push('_');
        }
        flat.push_str(part);
    }
    flat
}

/// A flattened name whose numbers are `*`, and how many of them there are.
pub(crate) fn collapse(flat: &str) -> String {
    let parts = flat.split(['_', '.']).map(|part| if is_number(part) { "*" } else { part });
    parts.collect::<Vec<_>>().join("_")
}

pub(crate) fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

/// The other names that an old attention processor's layer may have had in its model: `attn1.processor.to_out` was
/// `attn1.to_out.0`.
pub(crate) fn without_processor(flat: &str) -> Option<[String; 2]> {
    let parts: Vec<_> = flat.split('_').collect();
    let at = parts.iter().rposition(|part| *part == "processor")?;
    let rest = [&parts[..at], &parts[at + 1..]].concat().join("_");
    let zero = format!("{rest}_0");
    Some([rest, zero])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_do_not_count_and_numbers_do() {
        for name in [
            "blocks.1.self_attn.k",
            "blocks_1_self_attn_k",
            "_blocks_1.self_attn__k.",
            "blocks-1/self.attn k",
        ] {
            assert_eq!(flatten(name), "blocks_1_self_attn_k");
        }
        assert_ne!(flatten("blocks.10.k"), flatten("blocks.1.0.k"));
        assert_eq!(flatten("blocks.0._checkpoint_wrapped_module.attn._orig_mod.q"), "blocks_0_attn_q");
        assert_eq!(flatten("..__"), "");
        assert_eq!(collapse("blocks_12_attn_k_img"), "blocks_*_attn_k_img");
    }
}
