"""What else than weights takes of a device in a step: PyTorch's allocator on a GPU, what is occupied on the emulator."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Union

import torch

from . import _native
from ._native import Allocations
from .devices import Target

__all__ = ["CudaMemory", "EmulatedMemory", "allocations_of", "memory_of", "release_pools"]

_allocations: weakref.WeakKeyDictionary[Target, Allocations] = weakref.WeakKeyDictionary()


def allocations_of(target: Target) -> Allocations:
    """The allocations of a device, for which all of its models make room."""
    if target not in _allocations:
        _allocations[target] = Allocations(target.native)
    return _allocations[target]


class _Pools:
    """The pools that forwards allocate from: one is used by one thread at a time, as PyTorch wants it."""

    def __init__(self) -> None:
        self._idle: dict[int, list[Any]] = {}
        """By device."""
        self._functions: list[Any] = []
        """What all pools call to allocate and free, which must live as long as what was allocated."""
        self._released = 0
        self._threads = threading.local()

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        """In it, this thread allocates from a pool; also where it does already."""
        inside: set[int] = self._threads.__dict__.setdefault("devices", set())
        if device.index in inside:
            yield
            return
        pool, released = self._take(device.index), self._released
        inside.add(device.index)
        try:
            with torch.cuda.use_mem_pool(pool, device):
                yield
        finally:
            inside.discard(device.index)
            if released == self._released:
                self._idle.setdefault(device.index, []).append(pool)

    def release(self) -> None:
        """Gives back what the pools keep and nobody uses, which PyTorch does for a pool of others' only when that is dropped: one
        in use is when its step ends. What is in use goes back when it is freed."""
        self._released += 1
        self._idle.clear()

    def _take(self, index: int) -> Any:
        try:
            return self._idle[index].pop()
        except (KeyError, IndexError):
            pass
        if not self._functions:
            functions = torch.cuda.memory.CUDAPluggableAllocator(
                _native.__file__, "weightstream_allocate", "weightstream_free"
            )
            self._functions.append(functions)
        return torch.cuda.MemPool(self._functions[0].allocator())


_pools = _Pools()


def release_pools() -> None:
    """Gives back what was allocated in forwards and is kept though nobody uses it."""
    _pools.release()


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
        release_pools()
        torch.cuda.empty_cache()

    def allocating(self) -> AbstractContextManager[None]:
        """In it, this thread allocates from a pool that asks for room before an allocation fails."""
        return _pools.use(self._device)

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
