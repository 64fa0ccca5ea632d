"""Some rows of a packed weight as a packed weight of its own, where its layout lets rows apart.

Splitting a fused matrix, and putting rows in another order, then need no dequantizing. None stands for layouts in which rows
share bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Optional, Union

import torch
from torch import Tensor

from .._native import QuantWeight
from .description import Description, described
from .finding import Packed

__all__ = ["Rows", "take_rows", "taken_parts"]

Rows = Union[slice, Tensor]
"""Rows that follow each other, or row numbers in any order."""


def take_rows(packed: Packed, rows: Rows, name: str) -> Optional[Packed]:
    """Rows of a matrix, under another name. None if they cannot be had without dequantizing."""
    known = described(packed.weight.to_json())
    parts = taken_parts(known, packed.parts, rows)
    if parts is None:
        return None
    count = len(rows) if isinstance(rows, Tensor) else rows.stop - (rows.start or 0)
    fields = json.loads(known.text)
    fields["shape"] = [count, known.columns]
    for entry in fields["parts"]:
        taken = parts[entry["tensor"]]
        if known.blocks is not None:
            entry["shape"] = fields["shape"]
        elif taken is not packed.parts[entry["tensor"]]:
            entry["shape"] = list(taken.shape)
    weight = QuantWeight.from_json(json.dumps(fields))
    return Packed(name, weight, parts, packed.handler, dict(packed.hints), dict(packed.metadata))


def taken_parts(known: Description, parts: Mapping[str, Tensor], rows: Rows) -> Optional[dict[str, Tensor]]:
    """What of each part belongs to some rows of a matrix; None where that is no tensor."""
    if len(known.shape) != 2:
        return None
    form = known.fields["format"]
    kind, settings = next(iter(form.items())) if isinstance(form, dict) else (form, None)
    cut = {"Ggml": _ggml, "Scaled": _scaled, "W4A8": _w4a8}.get(kind)
    if cut is None:
        return None
    if kind == "Ggml":
        settings = {"columns": known.weight.block[1]}
    result: dict[str, Tensor] = {}
    for role, name in zip(known.roles, known.tensors):
        taken = cut(settings, role, parts[name], rows, known.shape)
        if taken is None:
            return None
        result[name] = taken
    return result


def _first(tensor: Tensor, rows: Rows) -> Tensor:
    if isinstance(rows, slice):
        return tensor[rows]
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:  # which few operators take
        return tensor.view(torch.uint8).index_select(0, rows).view(tensor.dtype)
    return tensor.index_select(0, rows)


def _ggml(settings: dict[str, int], role: str, tensor: Tensor, rows: Rows, shape: torch.Size) -> Optional[Tensor]:
    # Rows of whole blocks: as many bytes each.
    if tensor.dim() != 2 or tensor.shape[0] != shape[0] or shape[1] % settings["columns"]:
        return None
    return _first(tensor, rows)


def _scaled(settings: dict[str, Any], role: str, tensor: Tensor, rows: Rows, shape: torch.Size) -> Optional[Tensor]:
    if role == "Data":
        return _first(tensor, rows) if tensor.dim() == 2 and tensor.shape[0] == shape[0] else None
    if role not in ("Scale", "ZeroPoint") or settings["scales"] == "Tensor":
        return tensor
    if settings["scales"] == "Row":
        return _first(tensor, rows) if tensor.dim() and tensor.shape[0] == shape[0] else None
    blocks = settings["scales"]["Blocks"]
    height, width = min(blocks["rows"], shape[0]), min(blocks["columns"], shape[1])
    across = -(-shape[1] // width)
    if blocks["order"] == "Rows":
        grid = tensor.reshape(-1, across)
        if height == 1:
            return _first(grid, rows)
        if isinstance(rows, slice) and _aligned(rows, height, shape[0]):
            return grid[(rows.start or 0) // height : -(-rows.stop // height)]
        return None
    if blocks["order"] == "Swizzled" and height == 1 and isinstance(rows, slice) and _aligned(rows, 128, shape[0]):
        wide = -(-across // 4) * 4
        return tensor.reshape(-1, wide)[rows.start or 0 : -(-rows.stop // 128) * 128]
    return None


def _aligned(rows: slice, step: int, all_rows: int) -> bool:
    return (rows.start or 0) % step == 0 and (rows.stop % step == 0 or rows.stop == all_rows)


def _w4a8(settings: dict[str, Any], role: str, tensor: Tensor, rows: Rows, shape: torch.Size) -> Optional[Tensor]:
    if role == "Codebook":
        return tensor
    if role == "Correction":
        return (tensor[:, rows] if isinstance(rows, slice) else tensor.index_select(1, rows)).contiguous()
    return _first(tensor, rows) if tensor.dim() and tensor.shape[0] == shape[0] else None
