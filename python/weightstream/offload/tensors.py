"""Tensors over a checkpoint's bytes: zero-copy where they are aligned, copies of the few that are not.

A tensor shows the pages of a private mapping of its file. Writing to it changes this process's copy of the page and never
the file. Each tensor is its own storage of exactly its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import torch
from torch import Tensor

from .._native import Checkpoint
from ..errors import CheckpointError

__all__ = ["Entry", "map_tensors", "name_of_dtype"]

Entry = tuple[str, str, list[int], int, int, int]
"""Name, type as the file spells it, shape, number of its file, offset there and bytes."""

_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
"""How the file formats spell PyTorch's types."""
_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, dtype) for name, dtype in _NAMES.items() if hasattr(torch, dtype)
}
_SPELLED = {dtype: name for name, dtype in _DTYPES.items()}


def name_of_dtype(dtype: torch.dtype) -> Optional[str]:
    """How files spell a type, or None if they cannot hold it."""
    return _SPELLED.get(dtype)


def map_tensors(
    checkpoint: Checkpoint, entries: Sequence[Entry], poll: Callable[[float], None] = lambda _: None
) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """The tensors of a checkpoint that `entries` describe.

    Returns them, the block formats of those that are packed (shown as raw bytes, a row of blocks a row), and how many
    bytes were copied because they are not aligned. `poll` is called with the share that is done, and may raise.
    """
    tensors: dict[str, Tensor] = {}
    packed: dict[str, str] = {}
    copies: list[tuple[str, int, int]] = []
    for number, (name, kind, shape, file, offset, nbytes) in enumerate(entries):
        poll(number / len(entries))
        dtype, shape = _layout(checkpoint, name, kind, shape, file, nbytes)
        if kind not in _NAMES:
            packed[name] = kind
        if nbytes == 0:
            tensors[name] = torch.empty(shape, dtype=dtype)
        elif offset % dtype.itemsize:
            tensors[name] = torch.empty(shape, dtype=dtype)
            copies.append((name, tensors[name].data_ptr(), nbytes))
        else:
            memory = torch.utils.dlpack.from_dlpack(checkpoint.map(name))
            tensors[name] = torch.empty(0, dtype=dtype).set_(memory.untyped_storage(), 0, shape)
    if copies:
        total = sum(nbytes for _, _, nbytes in copies)
        checkpoint.read(copies, lambda done: poll(done / total))
    return tensors, packed, sum(nbytes for _, _, nbytes in copies)


def _layout(
    checkpoint: Checkpoint, name: str, kind: str, shape: list[int], file: int, nbytes: int
) -> tuple[torch.dtype, list[int]]:
    """How PyTorch shows a tensor of a file."""
    dtype = _DTYPES.get(kind)
    if kind in _NAMES or kind.startswith("F6_"):
        if dtype is None:
            where = checkpoint.files()[file]
            raise CheckpointError(f"{where}: {name} is {kind}, a type that PyTorch {torch.__version__} does not have")
        if kind == "F4":
            if not shape or shape[-1] % 2:
                where = checkpoint.files()[file]
                raise CheckpointError(f"{where}: {name} is F4 with shape {shape}; PyTorch holds two such values a byte")
            shape = [*shape[:-1], shape[-1] // 2]
        return dtype, list(shape)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return torch.uint8, [*shape[:-1], nbytes // rows if rows else 0]
