"""Rows of a weight on a device that alone knows which: gathered packed, so that nothing but them is dequantized."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Optional

import torch
from torch import Tensor

from ..filetypes import dtype_of_name
from .description import Description, as_bytes, described, restored
from .finding import Packed
from .rows import take_rows, taken_parts

__all__ = ["selected"]


def selected(known: Description, parts: Sequence[Tensor], rows: Tensor) -> Optional[tuple[Description, list[Tensor]]]:
    """The description and parts of these rows, in their order. None if the format's rows share bytes."""
    some = _described(known.text, rows.numel())
    if some is None:
        return None
    typed = {
        name: restored(part, kind, shape) if known.blocks is None else part
        for name, part, kind, shape in zip(known.tensors, parts, known.kinds, known.shapes)
    }
    taken = taken_parts(known, typed, rows)
    return None if taken is None else (some, [as_bytes(taken[name]) for name in known.tensors])


@lru_cache(maxsize=256)
def _described(text: str, count: int) -> Optional[Description]:
    """The description of so many rows."""
    known = described(text)
    if len(known.shape) != 2:
        return None
    parts = {}
    for name, kind, shape in zip(known.tensors, known.kinds, known.shapes):
        if known.blocks is not None:
            row = known.columns // known.weight.block[1] or 1
            parts[name] = torch.empty(known.rows, row, dtype=torch.uint8, device="meta")
        else:
            dtype = dtype_of_name(kind) or torch.uint8
            parts[name] = torch.empty(shape, dtype=dtype, device="meta")
    packed = Packed("weight", known.weight, parts, "")
    taken = take_rows(packed, torch.empty(count, dtype=torch.int64, device="meta"), "weight")
    return None if taken is None else Description(taken.weight.to_json())
