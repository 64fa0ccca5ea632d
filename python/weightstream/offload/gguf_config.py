"""The configuration of a language model of transformers, from what a GGUF file says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

from ..errors import ConfigError

__all__ = ["gguf_config"]

_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma": ("GemmaForCausalLM", "gemma"),
    "gemma2": ("Gemma2ForCausalLM", "gemma2"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
_FIELDS: tuple[tuple[str, str, Callable[[str], Any]], ...] = (
    ("embedding_length", "hidden_size", int),
    ("block_count", "num_hidden_layers", int),
    ("feed_forward_length", "intermediate_size", int),
    ("attention.head_count", "num_attention_heads", int),
    ("attention.head_count_kv", "num_key_value_heads", int),
    ("attention.key_length", "head_dim", int),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps", float),
    ("attention.sliding_window", "sliding_window", int),
    ("context_length", "max_position_embeddings", int),
    ("rope.freq_base", "rope_theta", float),
)
_NEEDED = ("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "padding_token_id": "pad"}


def gguf_config(metadata: Mapping[str, str], shapes: Mapping[str, list[int]], where: str) -> Optional[dict[str, Any]]:
    """The configuration in a GGUF file's metadata, with the shapes of its tensors. None if it is of no known architecture.

    ConfigError if a number that the model needs is missing.
    """
    architecture = metadata.get("general.architecture", "")
    if architecture not in _CLASSES or "token_embd.weight" not in shapes:
        return None
    name, model_type = _CLASSES[architecture]
    config: dict[str, Any] = {"architectures": [name], "model_type": model_type}
    for key, field, kind in _FIELDS:
        text = metadata.get(f"{architecture}.{key}")
        if text is None:
            continue
        try:
            config[field] = kind(text)
        except ValueError:
            raise ConfigError(f"{where}: {architecture}.{key} is {text!r}, where a number is due") from None
    missing = [field for field in _NEEDED if field not in config]
    if missing:
        raise ConfigError(f"{where} says nothing of {', '.join(missing)}, which a {name} needs")
    config["vocab_size"] = shapes["token_embd.weight"][0]
    config["tie_word_embeddings"] = "output.weight" not in shapes
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if architecture == "qwen2" and "sliding_window" in config:
        del config["sliding_window"]
    theta = config.pop("rope_theta", None)
    if theta is not None:
        # Both spellings: that of transformers 5, and that of 4.
        config["rope_theta"] = theta
        if architecture != "gemma3":
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    for key, token in _TOKENS.items():
        text = metadata.get(f"tokenizer.ggml.{key}", "")
        if text.isdigit():
            config[f"{token}_token_id"] = int(text)
    return config
