"""Names and layouts of language models in GGUF files, for models of transformers.

A GGUF file names its layers `blk.0.attn_q`, keeps query and key rows of llama models in another order, and stores the norms of
gemma models with the 1 that their code adds. All of it is undone here: on packed weights by moving whole rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import QuantizationError, WeightsError
from ..quant.finding import Packed
from ..quant.rows import take_rows
from .gguf_config import whole_number
from .quantized import Entry

__all__ = ["fitted", "transformers_names"]

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA = {
    **_LAYER,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LAYERS: dict[str, Mapping[str, str]] = {
    "llama": _LAYER,
    "qwen2": _LAYER,
    "qwen3": _LAYER,
    "gemma": _LAYER,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
}
"""By `general.architecture`: what a layer's modules are called in transformers."""
_UNUSED = ("rope_freqs.weight",)
"""What models of transformers compute from their configuration."""
_BLOCK = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")


def transformers_names(
    entries: dict[str, Entry], metadata: Mapping[str, str], expected: Mapping[str, Any]
) -> dict[str, Entry]:
    """The weights of a GGUF file under the names of transformers, if the model has those and not the file's own."""
    layers = _LAYERS.get(metadata.get("general.architecture", ""))
    if (
        layers is None
        or not any(name.startswith("blk.") for name in entries)
        or any(name in expected for name in entries)
    ):
        return entries
    architecture = metadata["general.architecture"]
    result: dict[str, Entry] = {}
    for name, entry in entries.items():
        if name in _UNUSED:
            continue
        renamed = _renamed(name, layers)
        if architecture == "llama":
            entry = _llama(name, entry, metadata)
        elif architecture.startswith("gemma") and name.endswith("norm.weight") and isinstance(entry, Tensor):
            entry = entry - 1
        if isinstance(entry, Packed):
            entry = Packed(renamed, entry.weight, entry.parts, entry.handler, entry.hints, entry.metadata)
        if renamed in result:
            raise WeightsError(
                f"{name} would be named {renamed}, as models of transformers have it, and so is another weight"
            )
        result[renamed] = entry
    if not any(name in expected for name in result):
        # Some classes keep the language model one level deeper, or leave the head out.
        return {name.removeprefix("model."): entry for name, entry in result.items()}
    return result


def fitted(
    entries: dict[str, Entry], metadata: Mapping[str, str], expected: Mapping[str, Any], notes: list[str]
) -> None:
    """Adds the leading 1 of a shape, which converters to GGUF drop, where the model has it; says so in `notes`."""
    if "general.architecture" not in metadata:
        return
    for name, entry in entries.items():
        wanted = expected.get(name)
        if isinstance(entry, Tensor) and wanted is not None and tuple(wanted.shape) == (1, *entry.shape):
            entries[name] = entry.unsqueeze(0)
            notes.append(f"{name} has the shape {list(entry.shape)} in the file and {list(wanted.shape)} in the model")


def _renamed(name: str, layers: Mapping[str, str]) -> str:
    inside = _BLOCK.fullmatch(name)
    if inside is not None and inside[2] in layers:
        return f"model.layers.{inside[1]}.{layers[inside[2]]}.{inside[3]}"
    module, _, leaf = name.rpartition(".")
    return f"{_OUTSIDE[module]}.{leaf}" if module in _OUTSIDE else name


def _llama(name: str, entry: Entry, metadata: Mapping[str, str]) -> Entry:
    """Query and key rows in the order of transformers, whose heads are two halves where the file has pairs."""
    inside = _BLOCK.fullmatch(name)
    if inside is None or inside[2] not in ("attn_q", "attn_k"):
        return entry
    heads = whole_number(metadata.get("llama.attention.head_count", ""))
    if inside[2] == "attn_k":
        heads = whole_number(metadata.get("llama.attention.head_count_kv", "")) or heads
    rows = entry.shape[0] if entry.shape else 0
    if not heads or not rows or rows % (2 * heads):
        raise QuantizationError(f"{name} has {rows} rows, which are no pairs of {heads} heads, as its file says")
    order = torch.arange(rows, device="cpu").view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
    if isinstance(entry, Tensor):
        return entry.index_select(0, order)
    taken = take_rows(entry, order, entry.name)
    if taken is None:
        raise QuantizationError(
            f"{name}, {entry.weight.format}, shares bytes between rows, and they must be put in order"
        )
    return taken
