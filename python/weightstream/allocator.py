"""A CUDA allocator for PyTorch that gives memory back. It has its names, and is not built yet."""

from __future__ import annotations

from typing import Any

from .errors import NotAvailableError

__all__ = ["install", "stats"]


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
