"""What operators know of a weight: its description, found by its text, and the memory of its parts.

Operators take descriptions as texts, so that a graph that was traced, exported or cached holds all that it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Optional

import torch
from torch import Tensor

from .._native import QuantWeight
from ..errors import QuantizationError
from ..filetypes import dtype_of_name, name_of_dtype

__all__ = ["Description", "as_bytes", "described", "local", "restored", "row_of"]


class Description:
    """A weight's description with what is asked of it often."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.weight = QuantWeight.from_json(text)
        self.fields: dict[str, Any] = json.loads(text)
        self.shape = torch.Size(self.weight.shape)
        self.columns = self.weight.columns
        self.rows = self.weight.rows
        self.roles = [role for role, *_ in self.weight.parts]
        self.tensors = [tensor for _, tensor, *_ in self.weight.parts]
        self.kinds = [kind for _, _, kind, _ in self.weight.parts]
        self.shapes = [tuple(shape) for *_, shape in self.weight.parts]
        form = self.fields["format"]
        self.scaled: Optional[dict[str, Any]] = form.get("Scaled") if isinstance(form, dict) else None
        """Of a weight that is numbers times scales: how."""
        self.blocks: Optional[str] = form.get("Ggml") if isinstance(form, dict) else None
        """The type of ggml's blocks."""

    def addresses(self, parts: Sequence[Tensor]) -> dict[str, tuple[int, int]]:
        """Where the bytes of the parts are. The parts must be kept until they were used."""
        if len(parts) != len(self.tensors):
            raise QuantizationError(f"{self.weight.name} has {len(self.tensors)} parts, and {len(parts)} were given")
        return {name: (part.data_ptr(), part.nbytes) for name, part in zip(self.tensors, parts)}

    def check(self, parts: Sequence[Tensor], name: str) -> None:
        """QuantizationError if a part has not the bytes that the shape asks for, or an index names groups that there are not.

        `name` is the weight's in its model, for the error. What is on a device is only looked at if there is an index.
        """
        if any(part.is_meta for part in parts):
            return
        if any(part.device.type != "cpu" for part in parts):
            if "GroupIndex" not in self.roles:
                return
            parts = [part.cpu() for part in parts]
        parts = [part.contiguous() for part in parts]
        module = name.rpartition(".")[0]
        full = {tensor: f"{module}.{tensor}" if module else tensor for tensor in self.tensors}
        places = {full[tensor]: place for tensor, place in self.addresses(parts).items()}
        self.weight.renamed(name, full).dequantize(places, [(0, 0)], 0, 0, "F32")

    def typed(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """The parts by role, in the types and shapes that the file gives them."""
        return {
            role: restored(part, kind, shape)
            for role, part, kind, shape in zip(self.roles, parts, self.kinds, self.shapes)
        }


@lru_cache(maxsize=None)
def described(text: str) -> Description:
    """The description in a text."""
    return Description(text)


def local(weight: QuantWeight) -> QuantWeight:
    """The same weight by its names inside its module: layers of one shape then have one description."""
    start = weight.name.rpartition(".")[0]
    start = start + "." if start else ""
    names = {tensor: tensor.removeprefix(start) for _, tensor, *_ in weight.parts}
    return weight.renamed(weight.name.removeprefix(start), names)


def as_bytes(part: Tensor) -> Tensor:
    """A tensor that no conversion of types touches: floating-point ones as bytes, the last dimension theirs.

    `.to(dtype)` of a module converts what is floating point, and libraries take a model's type from its first such
    parameter: neither may meet a scale, or numbers that are FP8.
    """
    part = part.detach().contiguous()
    if not part.is_floating_point():
        return part
    flat = part.reshape(1) if part.dim() == 0 else part
    return flat.view(torch.uint8)


def restored(part: Tensor, kind: str, shape: Iterable[int]) -> Tensor:
    """A part as its file has it, of what `as_bytes` gave."""
    dtype = dtype_of_name(kind)
    if dtype is None or not dtype.is_floating_point or part.dtype == dtype:
        return part
    shape = list(shape)
    if kind == "F4" and shape:
        shape[-1] //= 2
    return part.view(dtype).view(shape)


def row_of(name: str, tensor: Tensor) -> tuple[str, str, list[int]]:
    """A tensor as detection takes it: name, type as files spell it, shape. Blocks of ggml know what they are."""
    known = getattr(tensor, "_weightstream_blocks", None)
    if known is not None and tensor.nbytes == known[2]:
        return name, known[0], list(known[1])
    kind = name_of_dtype(tensor.dtype)
    if kind is None:
        raise QuantizationError(f"{name} is {tensor.dtype}, a type that no file holds")
    shape = list(tensor.shape)
    if kind == "F4" and shape:
        shape[-1] *= 2
    return name, kind, shape
