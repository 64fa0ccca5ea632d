//! Layers that two writers of one architecture name differently: Flux, `HunyuanVideo`, Lumina and Wan as their authors published them,
//! and as diffusers has them. Used only for names that a model does not have otherwise.

use crate::names::is_number;

/// A layer's name in the original, and the layers it is in diffusers, in the order of their rows; `*` is a number.
struct Pair {
    original: &'static str,
    diffusers: &'static [&'static str],
    /// Whether diffusers keeps the second half of the rows first.
    swapped: bool,
}

const fn pair(original: &'static str, diffusers: &'static [&'static str]) -> Pair {
    Pair { original, diffusers, swapped: false }
}

const PAIRS: &[Pair] = &[
    // Flux, with the q, k and v of both streams fused, and the input of a single block's feed-forward with them.
    pair(
        "double_blocks_*_img_attn_qkv",
        &[
            "transformer_blocks_*_attn_to_q",
            "transformer_blocks_*_attn_to_k",
            "transformer_blocks_*_attn_to_v",
        ],
    ),
    pair(
        "double_blocks_*_txt_attn_qkv",
        &[
            "transformer_blocks_*_attn_add_q_proj",
            "transformer_blocks_*_attn_add_k_proj",
            "transformer_blocks_*_attn_add_v_proj",
        ],
    ),
    pair("double_blocks_*_img_attn_proj", &["transformer_blocks_*_attn_to_out_0"]),
    pair("double_blocks_*_txt_attn_proj", &["transformer_blocks_*_attn_to_add_out"]),
    pair("double_blocks_*_img_mlp_0", &["transformer_blocks_*_ff_net_0_proj"]),
    pair("double_blocks_*_img_mlp_2", &["transformer_blocks_*_ff_net_2"]),
    pair("double_blocks_*_txt_mlp_0", &["transformer_blocks_*_ff_context_net_0_proj"]),
    pair("double_blocks_*_txt_mlp_2", &["transformer_blocks_*_ff_context_net_2"]),
    pair("double_blocks_*_img_mlp_0", &["transformer_blocks_*_ff_linear_in"]),
    pair("double_blocks_*_img_mlp_2", &["transformer_blocks_*_ff_linear_out"]),
    pair("double_blocks_*_txt_mlp_0", &["transformer_blocks_*_ff_context_linear_in"]),
    pair("double_blocks_*_txt_mlp_2", &["transformer_blocks_*_ff_context_linear_out"]),
    pair("double_blocks_*_img_mod_lin", &["transformer_blocks_*_norm1_linear"]),
    pair("double_blocks_*_txt_mod_lin", &["transformer_blocks_*_norm1_context_linear"]),
    pair(
        "single_blocks_*_linear1",
        &[
            "single_transformer_blocks_*_attn_to_q",
            "single_transformer_blocks_*_attn_to_k",
            "single_transformer_blocks_*_attn_to_v",
            "single_transformer_blocks_*_proj_mlp",
        ],
    ),
    pair("single_blocks_*_linear2", &["single_transformer_blocks_*_proj_out"]),
    pair("single_blocks_*_modulation_lin", &["single_transformer_blocks_*_norm_linear"]),
    pair("img_in", &["x_embedder"]),
    pair("txt_in", &["context_embedder"]),
    pair("time_in_in_layer", &["time_text_embed_timestep_embedder_linear_1"]),
    pair("time_in_out_layer", &["time_text_embed_timestep_embedder_linear_2"]),
    pair("vector_in_in_layer", &["time_text_embed_text_embedder_linear_1"]),
    pair("vector_in_out_layer", &["time_text_embed_text_embedder_linear_2"]),
    pair("guidance_in_in_layer", &["time_text_embed_guidance_embedder_linear_1"]),
    pair("guidance_in_out_layer", &["time_text_embed_guidance_embedder_linear_2"]),
    pair("final_layer_linear", &["proj_out"]),
    Pair { original: "final_layer_adaLN_modulation_1", diffusers: &["norm_out_linear"], swapped: true },
    // Flux 2: a single block is one layer in and one layer out in both.
    pair("single_blocks_*_linear1", &["single_transformer_blocks_*_attn_to_qkv_mlp_proj"]),
    pair("single_blocks_*_linear2", &["single_transformer_blocks_*_attn_to_out"]),
    // HunyuanVideo, where its names are not Flux's.
    pair("double_blocks_*_img_mlp_fc1", &["transformer_blocks_*_ff_net_0_proj"]),
    pair("double_blocks_*_img_mlp_fc2", &["transformer_blocks_*_ff_net_2"]),
    pair("double_blocks_*_txt_mlp_fc1", &["transformer_blocks_*_ff_context_net_0_proj"]),
    pair("double_blocks_*_txt_mlp_fc2", &["transformer_blocks_*_ff_context_net_2"]),
    pair("double_blocks_*_img_mod_linear", &["transformer_blocks_*_norm1_linear"]),
    pair("double_blocks_*_txt_mod_linear", &["transformer_blocks_*_norm1_context_linear"]),
    pair("single_blocks_*_modulation_linear", &["single_transformer_blocks_*_norm_linear"]),
    // Lumina 2 and Z-Image.
    pair("layers_*_attention_out", &["layers_*_attention_to_out_0"]),
    // Wan.
    pair("blocks_*_self_attn_q", &["blocks_*_attn1_to_q"]),
    pair("blocks_*_self_attn_k", &["blocks_*_attn1_to_k"]),
    pair("blocks_*_self_attn_v", &["blocks_*_attn1_to_v"]),
    pair("blocks_*_self_attn_o", &["blocks_*_attn1_to_out_0"]),
    pair("blocks_*_cross_attn_q", &["blocks_*_attn2_to_q"]),
    pair("blocks_*_cross_attn_k", &["blocks_*_attn2_to_k"]),
    pair("blocks_*_cross_attn_v", &["blocks_*_attn2_to_v"]),
    pair("blocks_*_cross_attn_o", &["blocks_*_attn2_to_out_0"]),
    pair("blocks_*_cross_attn_k_img", &["blocks_*_attn2_add_k_proj"]),
    pair("blocks_*_cross_attn_v_img", &["blocks_*_attn2_add_v_proj"]),
    pair("blocks_*_ffn_0", &["blocks_*_ffn_net_0_proj"]),
    pair("blocks_*_ffn_2", &["blocks_*_ffn_net_2"]),
];

/// What another name of a layer comes down to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Alias {
    /// These layers under each other.
    Layers { names: Vec<String>, swapped: bool },
    /// A part of this layer, with the names that all of its parts have in the file.
    Part { fused: String, number: usize, count: usize },
}

/// Everything else that a flattened name may mean.
pub(crate) fn aliases(flat: &str) -> Vec<Alias> {
    let numbers: Vec<_> = flat.split('_').filter(|part| is_number(part)).collect();
    let mut found = Vec::new();
    for pair in PAIRS {
        if fits(flat, pair.original) {
            let names = pair.diffusers.iter().map(|name| filled(name, &numbers)).collect();
            found.push(Alias::Layers { names, swapped: pair.swapped });
        }
        for (number, name) in pair.diffusers.iter().enumerate() {
            if fits(flat, name) {
                let original = filled(pair.original, &numbers);
                found.push(if pair.diffusers.len() == 1 {
                    Alias::Layers { names: vec![original], swapped: pair.swapped }
                } else {
                    Alias::Part { fused: original, number, count: pair.diffusers.len() }
                });
            }
        }
    }
    found
}

/// Whether a name is one of a pattern: equal words, and a number where the pattern has a star.
fn fits(flat: &str, with: &str) -> bool {
    flat.split('_').count() == with.split('_').count()
        && flat
            .split('_')
            .zip(with.split('_'))
            .all(|(word, with)| word == with || with == "*" && is_number(word))
}

/// A pattern with the name's first number for its star.
fn filled(pattern: &str, numbers: &[&str]) -> String {
    pattern.replace('*', numbers.first().copied().unwrap_or("0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flux_is_known_both_ways() {
        let expected = Alias::Part { fused: "single_blocks_12_linear1".into(), number: 3, count: 4 };
        assert_eq!(aliases("single_transformer_blocks_12_proj_mlp"), [expected]);
        let Some(Alias::Layers { names, swapped: false }) =
            aliases("single_blocks_7_linear1").into_iter().next()
        else {
            unreachable!("the first pair")
        };
        assert_eq!((names.len(), names[2].as_str()), (4, "single_transformer_blocks_7_attn_to_v"));
        assert_eq!(
            aliases("norm_out_linear"),
            [Alias::Layers { names: vec!["final_layer_adaLN_modulation_1".into()], swapped: true }]
        );
        assert!(aliases("double_blocks_x_img_mlp_0").is_empty());
        assert!(aliases("double_blocks_1_img_mlp_1").is_empty());
    }
}
