"""Tensors over a checkpoint's bytes: zero-copy where they are aligned, copies of the few that are not.

A tensor shows the pages of a private mapping of its file. Writing to it changes this process's copy of the page and never
the file. Each tensor is its own storage of exactly its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import torch
from torch import Tensor

from .._native import Checkpoint
from ..errors import CheckpointError
from ..filetypes import NAMES, dtype_of_name

__all__ = ["Entry", "map_tensors"]

Entry = tuple[str, str, list[int], int, int, int]
"""Name, type as the file spells it, shape, number of its file, offset there and bytes."""


def map_tensors(
    checkpoint: Checkpoint, entries: Sequence[Entry], poll: Callable[[float], None] = lambda _: None
) -> tuple[dict[str, Tensor], dict[str, str], int]:
    """The tensors of a checkpoint that `entries` describe.

    Returns them, the block formats of those that are packed (shown as raw bytes, a row of blocks a row, or all in one
    where blocks run over the ends of rows), and how many
    bytes were copied because they are not aligned. `poll` is called with the share that is done, and may raise.
    """
    tensors: dict[str, Tensor] = {}
    packed: dict[str, str] = {}
    copies: list[tuple[str, int, int]] = []
    for number, (name, kind, shape, file, offset, nbytes) in enumerate(entries):
        poll(number / len(entries))
        logical = shape
        dtype, shape = _layout(checkpoint, name, kind, shape, file, nbytes)
        if nbytes == 0:
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
        elif offset % dtype.itemsize:
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            copies.append((name, tensors[name].data_ptr(), nbytes))
        else:
            memory = torch.utils.dlpack.from_dlpack(checkpoint.map(name))
            tensors[name] = torch.empty(0, dtype=dtype, device="cpu").set_(memory.untyped_storage(), 0, shape)
        if kind not in NAMES:
            packed[name] = kind
            # Goes with the tensor, whatever it is renamed to.
            tensors[name]._weightstream_blocks = (kind, tuple(logical), nbytes)
    if copies:
        total = sum(nbytes for _, _, nbytes in copies)
        checkpoint.read(copies, lambda done: poll(done / total))
    return tensors, packed, sum(nbytes for _, _, nbytes in copies)


def _layout(
    checkpoint: Checkpoint, name: str, kind: str, shape: list[int], file: int, nbytes: int
) -> tuple[torch.dtype, list[int]]:
    """How PyTorch shows a tensor of a file."""
    dtype = dtype_of_name(kind)
    if kind in NAMES or kind.startswith("F6_"):
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
    if rows and nbytes % rows:
        return torch.uint8, [nbytes]  # a flattened convolution, say: no row has whole blocks
    return torch.uint8, [*shape[:-1], nbytes // rows if rows else 0]
