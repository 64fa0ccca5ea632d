"""Which of a model's tensors make quantized weights: by structure, names and types first, whatever they are called later.

Detection reads no tensor but small ones that describe others. What is found goes with the tensors themselves, so that
rules and functions that rename weights keep it; what they make anew is looked at again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
from torch import Tensor

from .. import _native
from .._native import QuantWeight
from ..errors import QuantizationError
from ..spans import is_wrapper
from .description import described, local, restored, row_of

__all__ = ["Found", "Packed", "find", "header_of"]


@dataclass(eq=False)
class Packed:
    """A quantized weight and its tensors, by their names in the module that has it."""

    name: str
    """The weight's name."""
    weight: QuantWeight
    """Its description, by names in the module."""
    parts: dict[str, Tensor]
    handler: str
    hints: dict[str, Tensor] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        """The logical shape."""
        return torch.Size(self.weight.shape)

    def check(self) -> None:
        """QuantizationError, by the names that it has in its model, if its numbers cannot be had from its parts."""
        known = described(self.weight.to_json())
        known.check([self.parts[tensor] for tensor in known.tensors], self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors."""
        return sum(part.nbytes for part in self.parts.values())


@dataclass(eq=False)
class Found:
    """What detection found in some tensors."""

    packed: dict[str, Packed]
    plain: dict[str, Tensor]
    notes: list[str]


def header_of(sd: Mapping[str, Any]) -> list[tuple[str, str, list[int]]]:
    """Names, types and shapes, as detection takes them. What is a quantized tensor object already is none of its business."""
    return [
        row_of(name, tensor) for name, tensor in sd.items() if isinstance(tensor, Tensor) and not is_wrapper(tensor)
    ]


def reader_of(sd: Mapping[str, Tensor]) -> Callable[[str], bytes]:
    """Reads a small tensor whole."""

    def read(name: str) -> bytes:
        tensor = sd[name].detach().cpu().contiguous()
        if tensor.is_meta:
            raise QuantizationError(f"{name} has no data, and says how its layer is quantized")
        flat = tensor.reshape(-1)
        return bytes((flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)).tolist())

    return read


def metadata_of(metadata: Optional[Mapping[str, str]], quantization_map: Optional[Mapping[str, Any]]) -> dict[str, str]:
    """Metadata as detection takes it, with the map of quantized modules in it."""
    found = {str(key): str(value) for key, value in (metadata or {}).items()}
    if quantization_map:
        found.pop("quantization_map_base64", None)
        found["quantization_map"] = json.dumps(
            {
                name: entry if isinstance(entry, Mapping) else {"weights": entry}
                for name, entry in quantization_map.items()
            },
            default=str,
        )
    return found


def find(
    sd: Mapping[str, Tensor],
    metadata: Optional[Mapping[str, str]] = None,
    quantization_map: Optional[Mapping[str, Any]] = None,
    without: Iterable[str] = (),
) -> Found:
    """The quantized weights among these tensors. QuantizationError, naming the layer, for what is not understood."""
    metadata = metadata_of(metadata, quantization_map)
    weights, hints, notes = _native.quant_detect(header_of(sd), metadata, reader_of(sd), list(without))
    packed: dict[str, Packed] = {}
    used = set(hints)
    for weight, handler in weights:
        start = _start(weight.name)
        parts = {tensor.removeprefix(start): sd[tensor] for _, tensor, *_ in weight.parts}
        used.update(tensor for _, tensor, *_ in weight.parts)
        packed[weight.name] = Packed(weight.name, local(weight), parts, handler)
        if handler == "torchao":
            packed[weight.name].metadata[weight.name.removeprefix(start)] = metadata.get(weight.name, "")
    by_module: dict[str, list[Packed]] = {}
    for found in packed.values():
        by_module.setdefault(_start(found.name), []).append(found)
    for hint in hints:
        # A hint belongs to the module that it lies in, or to the weight whose name it begins with.
        for start in _starts(hint):
            if start in by_module:
                by_module[start][0].hints[hint.removeprefix(start)] = sd[hint]
                break
    plain = {name: tensor for name, tensor in sd.items() if name not in used}
    return Found(packed, plain, notes)


def _start(name: str) -> str:
    module = name.rpartition(".")[0]
    return module + "." if module else ""


def _starts(name: str) -> list[str]:
    """The modules that a name may lie in, the innermost first."""
    found = []
    while name:
        name = name.rpartition(".")[0]
        found.append(name + "." if name else "")
    return found


def typed_parts(packed: Packed) -> dict[str, Tensor]:
    """The parts in the types that the file gives them, by role."""
    return {role: restored(packed.parts[tensor], kind, shape) for role, tensor, kind, shape in packed.weight.parts}
