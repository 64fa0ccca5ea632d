"""PyTorch's allocations and preloaded weights: what asks for room before it fails.

`install` and `stats` are the names of an allocator of our own that is not built yet.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import NotAvailableError
from .preloading import serve_allocations

__all__ = ["install", "serve_pressure", "stats"]


def serve_pressure(on: bool = True) -> None:
    """Whether the forwards of models with `autoPreload` allocate from a memory pool of PyTorch's whose allocation function is ours:
    where the device has no memory left, preloaded weights give theirs back, in the middle of the step, and the allocation
    succeeds. Off at first: what a pool keeps is not used outside it. NotAvailableError of a PyTorch without such pools."""
    if on and not (hasattr(torch.cuda, "MemPool") and hasattr(torch.cuda, "use_mem_pool")):
        raise NotAvailableError(
            f"allocator.serve_pressure needs memory pools with allocation functions, which PyTorch {torch.__version__} has not"
        )
    serve_allocations(on)


def install(mode: str = "vmm", spill: bool = False) -> None:
    """NotAvailableError: PyTorch's own allocator stays."""
    raise NotAvailableError(
        "allocator.install: the allocator is not built yet; PyTorch's own works with everything here"
    )


def stats(device: Any = None) -> dict[str, int]:
    """NotAvailableError: see `torch.cuda.memory_stats`."""
    raise NotAvailableError(
        "allocator.stats: the allocator is not built yet; torch.cuda.memory_stats has PyTorch's figures"
    )
