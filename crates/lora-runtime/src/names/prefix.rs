//! What stands in front of a layer's name in a file: wrappers of trainers and of models, and which of a pipeline's models is meant.

/// Which model of a pipeline a file's key speaks of, as far as its prefix says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Family {
    /// The model that denoises.
    Denoiser,
    /// The second of two such.
    SecondDenoiser,
    /// The first, second or third text encoder.
    TextEncoder(u8),
    /// The autoencoder.
    Vae,
}

impl Family {
    /// In words.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Denoiser => "transformer",
            Self::SecondDenoiser => "second transformer",
            Self::TextEncoder(1) => "text encoder",
            Self::TextEncoder(2) => "second text encoder",
            Self::TextEncoder(_) => "third text encoder",
            Self::Vae => "autoencoder",
        }
    }

    /// What a pipeline calls its model.
    pub(crate) fn of_component(name: &str) -> Option<Self> {
        PREFIXES.iter().find(|(prefix, _, _)| *prefix == name).and_then(|(_, _, family)| *family)
    }

    /// Whether a prefix of this family cannot be about a model of the other. A text encoder may be named `transformer` in a file.
    pub(crate) fn is_not(self, own: Self) -> bool {
        let denoises = |family| matches!(family, Self::Denoiser | Self::SecondDenoiser);
        denoises(own) && !denoises(self)
    }

    /// The names under which a file's header speaks of it.
    pub(crate) fn spaces(self) -> &'static [&'static str] {
        match self {
            Self::Denoiser => &["transformer", "unet", "diffusion_model"],
            Self::SecondDenoiser => &["transformer_2"],
            Self::TextEncoder(1) => &["text_encoder"],
            Self::TextEncoder(2) => &["text_encoder_2"],
            Self::TextEncoder(_) => &["text_encoder_3"],
            Self::Vae => &["vae"],
        }
    }
}

/// What may follow a prefix.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Joint {
    /// A dot only: with an underscore it would be part of a name (`transformer_blocks`).
    Dot,
    /// A dot, or any number of underscores.
    Any,
}

use Joint::{Any, Dot};

const PREFIXES: &[(&str, Joint, Option<Family>)] = &[
    ("base_model", Dot, None),
    ("model", Dot, None),
    ("module", Dot, None),
    ("pipe", Dot, None),
    ("_orig_mod", Dot, None),
    ("net", Dot, None),
    ("lycoris", Any, None),
    ("diffusion_model", Any, Some(Family::Denoiser)),
    ("transformer", Dot, Some(Family::Denoiser)),
    ("unet", Dot, Some(Family::Denoiser)),
    ("dit", Dot, Some(Family::Denoiser)),
    ("denoiser", Dot, Some(Family::Denoiser)),
    ("prior", Dot, Some(Family::Denoiser)),
    ("lora_unet", Any, Some(Family::Denoiser)),
    ("lora_transformer", Any, Some(Family::Denoiser)),
    ("lora_dit", Any, Some(Family::Denoiser)),
    ("lora_prior_unet", Any, Some(Family::Denoiser)),
    ("oft_unet", Any, Some(Family::Denoiser)),
    ("boft_unet", Any, Some(Family::Denoiser)),
    ("transformer_2", Dot, Some(Family::SecondDenoiser)),
    ("transformer2", Dot, Some(Family::SecondDenoiser)),
    ("text_model", Any, None),
    ("text_encoders", Dot, None),
    ("text_encoder", Dot, Some(Family::TextEncoder(1))),
    ("text_encoder_1", Dot, Some(Family::TextEncoder(1))),
    ("text_encoder_2", Dot, Some(Family::TextEncoder(2))),
    ("text_encoder_3", Dot, Some(Family::TextEncoder(3))),
    ("te", Dot, Some(Family::TextEncoder(1))),
    ("te1", Dot, Some(Family::TextEncoder(1))),
    ("te2", Dot, Some(Family::TextEncoder(2))),
    ("clip_l", Dot, Some(Family::TextEncoder(1))),
    ("clip_g", Dot, Some(Family::TextEncoder(2))),
    ("lora_te", Any, Some(Family::TextEncoder(1))),
    ("lora_te1", Any, Some(Family::TextEncoder(1))),
    ("lora_te2", Any, Some(Family::TextEncoder(2))),
    ("lora_te3", Any, Some(Family::TextEncoder(3))),
    ("vae", Dot, Some(Family::Vae)),
    ("lora_vae", Any, Some(Family::Vae)),
];

/// Wrappers that a model may have and a file may lack.
const WRAPPERS: &[&str] = &[
    "base_model",
    "model",
    "module",
    "_orig_mod",
    "net",
    "transformer",
    "diffusion_model",
    "unet",
    "text_model",
    "language_model",
    "encoder",
];

/// The most wrappers that are taken off one name.
const DEPTH: usize = 6;

/// A name less some of its prefixes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stripped<'a> {
    /// What was taken off, with its separators.
    pub(crate) prefix: &'a str,
    /// What is left.
    pub(crate) rest: &'a str,
    /// Which model the prefixes named, the first that does.
    pub(crate) family: Option<Family>,
}

/// A name with all of its prefixes, then with fewer and fewer.
pub(crate) fn strip(name: &str) -> Vec<Stripped<'_>> {
    let mut found = vec![Stripped { prefix: "", rest: name, family: None }];
    let mut at = 0;
    let mut family = None;
    while found.len() <= DEPTH {
        let Some((length, named)) = longest(&name[at..]) else { break };
        at += length;
        family = family.or(named);
        found.push(Stripped { prefix: &name[..at], rest: &name[at..], family });
    }
    found
}

/// The longest prefix of a name and what joins it, in bytes.
fn longest(name: &str) -> Option<(usize, Option<Family>)> {
    let fits = PREFIXES.iter().filter_map(|(prefix, joint, family)| {
        let rest = name.strip_prefix(prefix)?;
        let joints = match joint {
            Dot => usize::from(rest.starts_with('.')),
            Any => rest.len() - rest.trim_start_matches(['_', '.']).len(),
        };
        (joints > 0 && joints < rest.len()).then_some((prefix.len() + joints, *family))
    });
    fits.max_by_key(|(length, _)| *length)
}

/// A model's own name less wrappers, one after the other.
pub(crate) fn unwrapped(name: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(name), |name| {
        let (first, rest) = name.split_once('.')?;
        WRAPPERS.contains(&first).then_some(rest)
    })
    .skip(1)
    .take(DEPTH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(name: &str) -> (&str, Option<Family>) {
        let stripped = strip(name);
        stripped.last().map_or(("", None), |last| (last.rest, last.family))
    }

    #[test]
    fn wrappers_of_trainers_come_off() {
        let denoiser = Some(Family::Denoiser);
        assert_eq!(last("lora_unet_blocks_1.q"), ("blocks_1.q", denoiser));
        assert_eq!(last("lora_unet__blocks_1_q"), ("blocks_1_q", denoiser));
        assert_eq!(last("base_model.model.diffusion_model.blocks.0.q"), ("blocks.0.q", denoiser));
        assert_eq!(last("model.diffusion_model.blocks.0.q"), ("blocks.0.q", denoiser));
        assert_eq!(last("transformer_2.blocks.0.q"), ("blocks.0.q", Some(Family::SecondDenoiser)));
        assert_eq!(last("lora_te2_text_model_x"), ("x", Some(Family::TextEncoder(2))));
        assert_eq!(last("lycoris_blocks_0_q"), ("blocks_0_q", None));
    }

    #[test]
    fn a_name_that_begins_like_a_wrapper_is_kept() {
        assert_eq!(last("transformer_blocks.0.q"), ("transformer_blocks.0.q", None));
        assert_eq!(last("transformer."), ("transformer.", None));
        assert_eq!(unwrapped("model.transformer.h.0").collect::<Vec<_>>(), ["transformer.h.0", "h.0"]);
    }
}
