"""What else than weights takes of a device in a step: PyTorch's allocator on a GPU, what is occupied on the emulator."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Union

import torch

from . import _native
from ._native import Allocations
from .devices import Target

__all__ = ["CudaMemory", "EmulatedMemory", "allocations_of", "memory_of"]

_allocations: weakref.WeakKeyDictionary[Target, Allocations] = weakref.WeakKeyDictionary()


def allocations_of(target: Target) -> Allocations:
    """The allocations of a device, for which all of its models make room."""
    if target not in _allocations:
        _allocations[target] = Allocations(target.native)
    return _allocations[target]


_pools: dict[int, tuple[Any, Any]] = {}
"""By device: the pool, and the functions it calls, which must live as long."""


class CudaMemory:
    """What PyTorch's allocator takes on a GPU."""

    def __init__(self, target: Target) -> None:
        self._device = target.device
        self._before = 0

    def room(self) -> tuple[int, int]:
        """What is free, and what the allocator keeps beside that."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return free, torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)

    def trim(self) -> None:
        """Has the allocator give back what it keeps."""
        torch.cuda.empty_cache()

    def allocating(self) -> AbstractContextManager[None]:
        """In it, this thread allocates from a pool that asks for room before an allocation fails."""
        index = self._device.index
        if index not in _pools:
            functions = torch.cuda.memory.CUDAPluggableAllocator(
                _native.__file__, "weightstream_allocate", "weightstream_free"
            )
            _pools[index] = (torch.cuda.MemPool(functions.allocator()), functions)
        return torch.cuda.use_mem_pool(_pools[index][0], self._device)

    def begin(self) -> None:
        """A step begins that is to be measured."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def end(self) -> int:
        """What it took at most beyond what was there."""
        return max(torch.cuda.max_memory_allocated(self._device) - self._before, 0)


class EmulatedMemory:
    """What something else than weights takes on an emulated device: what was occupied on its driver."""

    def __init__(self, target: Target) -> None:
        self._native = target.native
        self._before = 0

    def room(self) -> tuple[int, int]:
        """What is free; nothing is kept beside that."""
        return self._native.free_memory(), 0

    def trim(self) -> None:
        """Nothing is kept."""

    def allocating(self) -> AbstractContextManager[None]:
        """PyTorch allocates nothing there."""
        return nullcontext()

    def begin(self) -> None:
        """A step begins that is to be measured."""
        self._before, _ = self._native.occupied()

    def end(self) -> int:
        """What it took at most beyond what was there."""
        _, peak = self._native.occupied()
        return max(peak - self._before, 0)


def memory_of(target: Target) -> Union[CudaMemory, EmulatedMemory]:
    """The memory of a device, as steps are measured by it."""
    return EmulatedMemory(target) if target.emulated else CudaMemory(target)
