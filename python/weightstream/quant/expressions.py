"""Weights as expressions of PyTorch's operators, in f32: the same numbers as the native decoders, on any device.

For formats that are a number times a scale. Others give None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from torch import Tensor

from .description import Description

__all__ = ["expression"]


def expression(known: Description, parts: Sequence[Tensor]) -> Optional[Tensor]:
    """The numbers of a weight in f32, in its shape; None if its format is no such expression."""
    scaled = known.scaled
    if scaled is None or scaled["codes"] not in ("E4m3", "E5m2", "Int8"):
        return None
    if scaled["global"] not in ("None", "Per127"):
        return None
    tensors = known.typed(parts)
    matrix = tensors["Data"].reshape(known.shape[0] if len(known.shape) > 1 else 1, -1).float()
    if scaled["zero_point"]:
        zero_point = _spread(tensors["ZeroPoint"], scaled["scales"], matrix)
        if zero_point is None:
            return None
        matrix = matrix - zero_point
    if scaled["scales"] != "None":
        scale = _spread(tensors["Scale"], scaled["scales"], matrix)
        if scale is None:
            return None
        matrix = matrix * scale
        if scaled["global"] == "Per127":
            matrix = matrix * (1.0 / 127.0)
    return matrix.view(known.shape)


def _spread(scale: Tensor, scales: Any, matrix: Tensor) -> Optional[Tensor]:
    """A scale for each number, or what broadcasts to that."""
    scale = scale.float() if scale.dtype.itemsize > 1 or not scale.is_floating_point() else None
    if scale is None:
        return None
    if scales == "Tensor":
        return scale.reshape(1, 1)
    if scales == "Row":
        return scale.reshape(-1, 1)
    blocks = scales.get("Blocks") if isinstance(scales, dict) else None
    if blocks is None or blocks["order"] != "Rows":
        return None
    height, width = min(blocks["rows"], matrix.shape[0]), min(blocks["columns"], matrix.shape[1])
    below, beside = -(-matrix.shape[0] // height), -(-matrix.shape[1] // width)
    wide = scale.reshape(below, beside).repeat_interleave(height, 0).repeat_interleave(width, 1)
    return wide[: matrix.shape[0], : matrix.shape[1]]
