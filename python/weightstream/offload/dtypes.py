"""Which type each weight gets, and the conversion: in pieces, so that a load stops when it is asked to.

A weight that still shows a checkpoint's bytes is read from the file, not through its mapping: a file that was cut
meanwhile is then an error that names the weight. What was changed in memory counts as changed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor, nn

from .. import _native
from ..errors import WeightsError

__all__ = ["Converter", "DtypeRules", "empty"]

_PIECE = 16 << 20
"""Bytes converted between two looks at whether to stop: a few milliseconds."""
_LARGE = 4 << 20
"""Bytes from which memory of its own, in huge pages, is taken: it goes back to the system in an instant, where the heap
would keep it, and can be page-locked as it lies."""


@dataclass(frozen=True)
class DtypeRules:
    """What a load does to the types of floating-point parameters. Buffers and integers keep theirs."""

    default: Optional[torch.dtype]
    """The type of all of them; None keeps the checkpoint's."""
    fp32: Optional[torch.dtype]
    """Without a default: the type for those that are float32."""

    def __post_init__(self) -> None:
        for name, given in (("default_dtype", self.default), ("fp32_dtype", self.fp32)):
            if given is not None and not (isinstance(given, torch.dtype) and given.is_floating_point):
                raise WeightsError(
                    f"{name} is {given!r}; give a floating-point torch.dtype, such as torch.bfloat16, or None"
                )

    def target(self, module: nn.Module, attributes: dict[str, Any], dtype: torch.dtype) -> torch.dtype:
        """The type for a parameter of `module`, by its own attributes and its type in the checkpoint.

        `_lock_dtype`, of the parameter or else of the module that holds it, counts before all else: a type is the one to
        use, anything else that is true keeps the checkpoint's.
        """
        if not dtype.is_floating_point:
            return dtype
        lock = attributes.get("_lock_dtype") or getattr(module, "_lock_dtype", None)
        if lock:
            return lock if isinstance(lock, torch.dtype) else dtype
        if self.default is not None:
            return self.default
        return self.fp32 if self.fp32 is not None and dtype == torch.float32 else dtype


class Converter:
    """Converts weights one after the other through one small buffer."""

    def __init__(self, poll: Callable[[float], None], total: int) -> None:
        """`total` bytes will be converted; `poll` is called with the share done, and may raise."""
        self._poll = poll
        self._total = max(total, 1)
        self._done = 0
        self._buffer: Optional[Tensor] = None
        self.overflows: dict[str, int] = {}
        """How many finite values of a weight became infinite, by its name."""

    def __call__(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """The tensor's values as `dtype`, in memory of their own. `name` is for errors."""
        if tensor.is_contiguous() and tensor.device.type == "cpu":
            result = empty(tensor.shape, dtype)
            self._flat(name, tensor.view(-1) if tensor.dim() != 1 else tensor, result.view(-1))
            return result
        self._advance(tensor.nbytes)
        converted = tensor.to(dtype)
        self._count(name, tensor, converted)
        return converted

    def _flat(self, name: str, source: Tensor, target: Tensor) -> None:
        size = source.element_size()
        step = max(_PIECE // size, 1)
        for start in range(0, source.numel(), step):
            piece = source[start : start + step]
            read = self._read(name, piece)
            self._count(name, read, target[start : start + step].copy_(read))
            self._advance(piece.nbytes)

    def _count(self, name: str, before: Tensor, after: Tensor) -> None:
        """Counts what became infinite. Only float16 is that narrow among the types that have infinity."""
        if after.dtype != torch.float16 or before.dtype == torch.float16:
            return
        lost = int(after.isinf().sum()) - int(before.isinf().sum())
        if lost:
            self.overflows[name] = self.overflows.get(name, 0) + lost

    def _read(self, name: str, piece: Tensor) -> Tensor:
        """The piece's bytes from its file, if they are there, else itself."""
        if self._buffer is None:
            self._buffer = torch.empty(_PIECE + 16, dtype=torch.uint8, device="cpu")
        if _native.read_mapped(name, piece.data_ptr(), piece.nbytes, self._buffer.data_ptr()):
            return self._buffer[: piece.nbytes].view(piece.dtype)
        return piece

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._poll(self._done / self._total)


def empty(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Memory for a tensor; for a large one, of its own."""
    size = shape.numel() * dtype.itemsize
    if size < _LARGE:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # advice: a kernel without huge pages refuses it
            pass
    return torch.frombuffer(memory, dtype=dtype).view(shape)
