"""What a saved file has to say of a model's quantized layers so that it loads again as what it was.

Structure says most: the tensors keep the names and types that they came with. Blocks of ggml are bytes in a safetensors file,
so the map of quantized modules names their type; rotated layers have a marker; torchao's have their metadata. Before anything
is written, detection reads it all back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .._native import QuantWeight
from ..errors import NotAvailableError, QuantizationError
from ..quant.description import described
from ..quant.finding import find
from ..quant.module import QuantModule

__all__ = ["DescribedLayers", "described_layers"]


@dataclass(eq=False)
class DescribedLayers:
    """The quantized layers of a model, as a file describes them."""

    layers: dict[str, QuantModule] = field(default_factory=dict)
    quantization_map: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    markers: dict[str, Tensor] = field(default_factory=dict)
    """Tensors beside the model's own."""

    def check(self, kept: Mapping[str, Tensor], ties: Mapping[str, list[str]], metadata: Mapping[str, str]) -> None:
        """NotAvailableError, naming the layer, if the file would not load as what the model is."""
        if not self.layers:
            return
        # Without what only memory knows, as the file will be.
        bare = {name: tensor.view(tensor.shape) for name, tensor in kept.items()}
        try:
            found = find(bare, metadata).packed
        except QuantizationError as error:
            raise NotAvailableError(f"the file would not say how its layers are quantized: {error}") from error
        saved_as = {alias: name for name, aliases in ties.items() for alias in aliases}
        for module, layer in self.layers.items():
            start = module + "." if module else ""
            weight = layer.quant_weight
            first = start + weight.parts[0][1]
            if first not in kept and first not in saved_as:
                continue  # left out by filter_sd
            base = saved_as.get(first, first).removesuffix(weight.parts[0][1])
            entry = found.get(base + weight.name)
            if entry is None or not _same(entry.weight, weight):
                raise NotAvailableError(
                    f"{start}weight, {weight.format}, cannot be saved packed: no file says what it is"
                )


def _same(found: QuantWeight, weight: QuantWeight) -> bool:
    try:
        return found.with_shape(weight.shape) == weight
    except QuantizationError:
        return False


def described_layers(model: nn.Module) -> DescribedLayers:
    """What a file has to say of a model's quantized layers."""
    result = DescribedLayers()
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, QuantModule):
            continue
        start = name + "." if name else ""
        result.layers[name] = module
        known = described(module.quant_text)
        kind = _map_entry(known.fields["format"])
        if kind is not None:
            result.quantization_map[name] = {"weights": kind, "activations": "none"}
            if kind.startswith("q"):
                result.metadata["quantization_format"] = "quanto"
                for scale in ("input_scale", "output_scale"):
                    if scale not in module.quant_hints:
                        result.markers[start + scale] = torch.ones((), dtype=module.compute_dtype, device="cpu")
        result.metadata.update({start + key: text for key, text in module.quant_metadata.items()})
        config = _config(known.fields["format"])
        if config is not None:
            result.metadata["quantization_config"] = json.dumps(config)
        marker = _marker(known.fields)
        if marker is not None and "comfy_quant" not in module.quant_hints:
            text = json.dumps(marker).encode()
            result.markers[f"{start}comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
    return result


def _map_entry(form: Any) -> Optional[str]:
    """The name that a map of quantized modules has for a format, if it is one that maps name."""
    if not isinstance(form, dict):
        return None
    if "Ggml" in form:
        return str(form["Ggml"])
    if "QuantoBits" in form:
        return f"qint{form['QuantoBits']['bits']}"
    scaled = form.get("Scaled")
    if scaled is None or scaled["family"] not in ("QInt8", "QFloat8"):
        return None
    if scaled["family"] == "QInt8":
        return "qint8"
    return "qfloat8" if scaled["codes"] == "E4m3" else "qfloat8_e5m2"


def _config(form: Any) -> Optional[dict[str, str]]:
    """What only a model's configuration says of a format."""
    if not isinstance(form, dict):
        return None
    words, scaled = form.get("PackedInt"), form.get("Scaled")
    if words is not None and words["words"] == "Columns" and not words["zero_less_one"]:
        return {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
    if scaled is not None and (scaled["family"], scaled["codes"], scaled["global"]) == ("NvFp4", "E2m1Low", "Factor"):
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    return None


def _marker(fields: dict[str, Any]) -> Optional[dict[str, Any]]:
    """What says of a layer that tensors do not say."""
    form = fields["format"]
    rotation = next((step["Hadamard"]["group"] for step in fields["transforms"] if isinstance(step, dict)), None)
    scaled = form.get("Scaled") if isinstance(form, dict) else None
    if isinstance(form, dict) and "W4A8" in form:
        settings = {"format": "asym_w4a8_int8", "group_size": form["W4A8"]["group"]}
        return {**settings, "convrot_groupsize": rotation}
    if scaled is None:
        return None
    if scaled["family"] == "MxFp8":
        # Files that name the format have its scales in tiles.
        return {"format": "mxfp8"} if scaled["scales"]["Blocks"]["order"] == "Swizzled" else None
    if scaled["family"] == "Int8" and rotation is not None:
        return {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": rotation}
    blocks = scaled["scales"].get("Blocks") if isinstance(scaled["scales"], dict) else None
    if blocks is not None and scaled["family"] in ("Fp8", "Int8"):
        name = "int8_blockwise" if scaled["family"] == "Int8" else "float8_e4m3fn_blockwise"
        if scaled["codes"] != "E5m2" and blocks["rows"] in (1, blocks["columns"]):
            return {"format": name, "group_size": blocks["columns"]}
    return None
