"""The configuration of a language model of transformers, from what a GGUF file says of it.

It is text of strangers that a model is built by: sizes are bounded by the tensors that are there before anything is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Optional

from ..errors import ConfigError

__all__ = ["gguf_config", "whole_number"]

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
_DIMENSIONS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""What no tensor can be smaller than all of."""
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "padding_token_id": "pad"}


def whole_number(text: str) -> Optional[int]:
    """A number from 0 on that 63 bits hold, in the digits that files have; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def gguf_config(metadata: Mapping[str, str], shapes: Mapping[str, list[int]], where: str) -> Optional[dict[str, Any]]:
    """The configuration in a GGUF file's metadata, with the shapes of its tensors. None if it is of no known architecture.

    ConfigError if a number that the model needs is missing, or none that its tensors could have.
    """
    architecture = metadata.get("general.architecture", "")
    if architecture not in _CLASSES or len(shapes.get("token_embd.weight", ())) != 2:
        return None
    name, model_type = _CLASSES[architecture]
    config: dict[str, Any] = {"architectures": [name], "model_type": model_type}
    for key, field, kind in _FIELDS:
        text = metadata.get(f"{architecture}.{key}")
        if text is None:
            continue
        number = whole_number(text) if kind is int else _real(text)
        if number is None:
            shown = text if len(text) < 100 else f"{text[:100]}…"
            raise ConfigError(f"{where}: {architecture}.{key} is {shown!r}, where a number is due")
        config[field] = number
    missing = [field for field in _NEEDED if field not in config]
    if missing:
        raise ConfigError(f"{where} says nothing of {', '.join(missing)}, which a {name} needs")
    largest = max(size for shape in shapes.values() for size in (*shape, 1))
    for key, field, _ in _FIELDS:
        most, of = (
            (len(shapes), "tensors") if field == "num_hidden_layers" else (largest, "as the largest dimension of any")
        )
        if (field in _DIMENSIONS or field == "num_hidden_layers") and not 1 <= config.get(field, 1) <= most:
            raise ConfigError(f"{where}: {architecture}.{key} is {config[field]}, and the file has {most} {of}")
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
        number = whole_number(metadata.get(f"tokenizer.ggml.{key}", ""))
        if number is not None:
            config[f"{token}_token_id"] = number
    return config


def _real(text: str) -> Optional[float]:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < math.inf else None
