"""The pools that forwards allocate from, with a made-up PyTorch that refuses what the real one refuses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from weightstream import step_memory

GPU = torch.device("cuda", 3)


class Pool:
    made: weakref.WeakSet[Pool] = weakref.WeakSet()

    def __init__(self, allocator: Any) -> None:
        self.used = 0
        Pool.made.add(self)


class Functions:
    def __init__(self, *names: str) -> None:
        assert names[1:] == ("weightstream_allocate", "weightstream_free")

    def allocator(self) -> None:
        """What a pool is made of."""


@contextmanager
def use_mem_pool(pool: Pool, device: torch.device) -> Iterator[None]:
    assert device == GPU
    pool.used += 1
    assert pool.used == 1, "already recording to this pool"
    try:
        yield
    finally:
        pool.used -= 1


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> step_memory._Pools:
    Pool.made.clear()
    monkeypatch.setattr(torch.cuda, "MemPool", Pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Functions)
    return step_memory._Pools()


def alive() -> int:
    gc.collect()
    return len(Pool.made)


def test_steps_one_after_another_and_in_one_another_take_one_pool(pools: step_memory._Pools) -> None:
    for _ in range(3):
        with pools.use(GPU), pools.use(GPU):
            assert alive() == 1
    with pytest.raises(KeyError), pools.use(GPU):
        raise KeyError
    with pools.use(GPU):
        assert alive() == 1


def test_threads_take_pools_of_their_own_and_leave_them_to_others(pools: step_memory._Pools) -> None:
    both = threading.Barrier(2, timeout=30)

    def step() -> int:
        with pools.use(GPU):
            both.wait()
            count = len(Pool.made)
            both.wait()
        return count

    for _ in range(2):
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(lambda _: step(), range(2))) == [2, 2]


def test_what_is_released_is_dropped_at_the_end_of_its_step(pools: step_memory._Pools) -> None:
    with pools.use(GPU):
        pass
    assert alive() == 1
    pools.release()
    assert alive() == 0
    with pools.use(GPU):
        pools.release()
        with pools.use(GPU):
            assert alive() == 1
    assert alive() == 0
