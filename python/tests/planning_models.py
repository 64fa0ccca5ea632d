"""Tiny models with random weights of many transformers and diffusers classes, each with inputs that run it.

Each maker gives a model in eval mode and the keyword arguments of its forward. Nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, dict[str, Any]]

_IDS = torch.arange(2, 14)[None]


def _text(model_class: str, config_class: str, **config: Any) -> Callable[[], Made]:
    """A transformers model that takes token ids."""

    def make() -> Made:
        import transformers

        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
        inputs = {"input_ids": _IDS}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = _IDS[:, :5]
        return model, inputs

    return make


_LLAMA = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_BERT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}  # fmt: skip
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 4}


def _clip() -> Made:
    import transformers

    text = {**_BERT, "eos_token_id": 13, "projection_dim": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=16)
    return transformers.CLIPModel(config), {"input_ids": _IDS, "pixel_values": torch.randn(1, 3, 16, 16)}


def _whisper() -> Made:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=64, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, d_model=32, max_source_positions=16,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    inputs = {"input_features": torch.randn(1, 8, 32), "decoder_input_ids": _IDS[:, :5]}
    return transformers.WhisperForConditionalGeneration(config), inputs


def _vision(model_class: str, config_class: str, **config: Any) -> Callable[[], Made]:
    """A transformers model that takes an image."""

    def make() -> Made:
        import transformers

        size = config.get("image_size", 32)
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**config))
        return model, {"pixel_values": torch.randn(1, 3, size, size)}

    return make


def _wav2vec2() -> Made:
    import transformers

    config = transformers.Wav2Vec2Config(
        **{**_BERT, "num_hidden_layers": 3}, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8),
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, apply_spec_augment=False,
    )  # fmt: skip
    return transformers.Wav2Vec2Model(config), {"input_values": torch.randn(1, 800)}


def _unet() -> Made:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(16, 32), layers_per_block=2,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16, attention_head_dim=8, norm_num_groups=8,
    )  # fmt: skip
    return model, {"sample": torch.randn(1, 4, 8, 8), "timestep": 5, "encoder_hidden_states": torch.randn(1, 4, 16)}


def _controlnet() -> Made:
    from diffusers import ControlNetModel

    model = ControlNetModel(
        in_channels=4, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=16, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), norm_num_groups=8,
        conditioning_embedding_out_channels=(16, 32),
    )  # fmt: skip
    inputs = {"sample": torch.randn(1, 4, 8, 8), "timestep": 5, "encoder_hidden_states": torch.randn(1, 4, 16)}
    return model, {**inputs, "controlnet_cond": torch.randn(1, 3, 16, 16)}


def _vae() -> Made:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(16, 32), down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=8,
    )  # fmt: skip
    return model, {"sample": torch.randn(1, 3, 16, 16)}


def _dit() -> Made:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([5])}
    return model, {**inputs, "class_labels": torch.tensor([3])}


def _pixart() -> Made:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=3, sample_size=8,
        patch_size=2, cross_attention_dim=32, caption_channels=24, use_additional_conditions=False,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([5])}
    added = {"resolution": None, "aspect_ratio": None}
    return model, {**inputs, "encoder_hidden_states": torch.randn(1, 6, 24), "added_cond_kwargs": added}


def _sd3() -> Made:
    from diffusers import SD3Transformer2DModel

    model = SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(1, 4, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 24)}
    return model, {**inputs, "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([5])}


def _flux() -> Made:
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=24, pooled_projection_dim=16, axes_dims_rope=[4, 4, 8], guidance_embeds=True,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 24)}
    ids = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3), "guidance": torch.ones(1)}
    return model, {**inputs, **ids, "pooled_projections": torch.randn(1, 16), "timestep": torch.tensor([0.5])}


def _wan() -> Made:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=3, cross_attn_norm=True, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {"hidden_states": torch.randn(1, 4, 2, 8, 8), "encoder_hidden_states": torch.randn(1, 6, 16)}
    return model, {**inputs, "timestep": torch.tensor([5])}


MODELS: dict[str, Callable[[], Made]] = {
    "llama": _text("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
    "llama_tied": _text("LlamaForCausalLM", "LlamaConfig", **_LLAMA, tie_word_embeddings=True),
    "qwen2": _text("Qwen2ForCausalLM", "Qwen2Config", **_LLAMA),
    "qwen3": _text("Qwen3ForCausalLM", "Qwen3Config", **_LLAMA, head_dim=8),
    "mistral": _text("MistralForCausalLM", "MistralConfig", **_LLAMA),
    "mixtral": _text("MixtralForCausalLM", "MixtralConfig", **_LLAMA, **_MOE),
    "gemma": _text("GemmaForCausalLM", "GemmaConfig", **_LLAMA, head_dim=8),
    "gemma2": _text("Gemma2ForCausalLM", "Gemma2Config", **_LLAMA, head_dim=8),
    "phi": _text("PhiForCausalLM", "PhiConfig", **_LLAMA),
    "phi3": _text("Phi3ForCausalLM", "Phi3Config", **_LLAMA),
    "gpt2": _text("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64),
    "gpt_neox": _text("GPTNeoXForCausalLM", "GPTNeoXConfig", **_BERT),
    "gptj": _text("GPTJForCausalLM", "GPTJConfig", vocab_size=64, n_embd=32, n_layer=3, n_head=4, rotary_dim=4),
    "opt": _text(
        "OPTForCausalLM", "OPTConfig", vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32,
    ),
    "falcon": _text(
        "FalconForCausalLM", "FalconConfig", vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
    ),
    "bloom": _text("BloomForCausalLM", "BloomConfig", vocab_size=64, hidden_size=32, n_layer=3, n_head=4),
    "mamba": _text("MambaForCausalLM", "MambaConfig", vocab_size=64, hidden_size=32, num_hidden_layers=3, state_size=8),
    "mamba2": _text(
        "Mamba2ForCausalLM", "Mamba2Config", vocab_size=64, hidden_size=32, num_hidden_layers=3, state_size=8,
        head_dim=8, num_heads=8, n_groups=2, chunk_size=8,
    ),
    "bert": _text("BertModel", "BertConfig", **_BERT),
    "roberta": _text("RobertaModel", "RobertaConfig", **_BERT),
    "electra": _text("ElectraModel", "ElectraConfig", **_BERT, embedding_size=32),
    "mpnet": _text("MPNetModel", "MPNetConfig", **_BERT),
    "deberta_v2": _text(
        "DebertaV2Model", "DebertaV2Config", **_BERT, relative_attention=True, pos_att_type=["p2c", "c2p"],
        max_relative_positions=16, share_att_key=False,
    ),
    "distilbert": _text(
        "DistilBertModel", "DistilBertConfig", vocab_size=64, dim=32, hidden_dim=64, n_layers=3, n_heads=4,
    ),
    "albert": _text("AlbertModel", "AlbertConfig", **_BERT, embedding_size=16, num_hidden_groups=2),
    "t5": _text("T5ForConditionalGeneration", "T5Config", **_T5),
    "umt5_encoder": _text("UMT5EncoderModel", "UMT5Config", **_T5, is_encoder_decoder=False),
    "bart": _text(
        "BartForConditionalGeneration", "BartConfig", vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
        max_position_embeddings=64,
    ),
    "clip": _clip,
    "whisper": _whisper,
    "wav2vec2": _wav2vec2,
    "vit": _vision("ViTModel", "ViTConfig", **_VISION),
    "siglip_vision": _vision("SiglipVisionModel", "SiglipVisionConfig", **_VISION),
    "dinov2": _vision("Dinov2Model", "Dinov2Config", **{**_VISION, "mlp_ratio": 2}),
    "swin": _vision(
        "SwinModel", "SwinConfig", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
        window_size=4,
    ),
    "convnext": _vision("ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 16, 32, 64], depths=[1, 1, 2, 1]),
    "segformer": _vision("SegformerModel", "SegformerConfig", depths=[1, 1, 2, 2], hidden_sizes=[8, 16, 24, 32]),
    "unet": _unet,
    "controlnet": _controlnet,
    "autoencoder_kl": _vae,
    "dit": _dit,
    "pixart": _pixart,
    "sd3": _sd3,
    "flux": _flux,
    "wan": _wan,
}  # fmt: skip


def make(name: str) -> Made:
    """The model of that name, with the same weights every time."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    # Frozen, as attach leaves it. Untrained biases and norms are constant and would hide a missing read.
    for parameter in model.requires_grad_(False).parameters():
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval(), inputs
