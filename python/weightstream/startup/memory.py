"""Memory of CUDA devices as phases record it. Asks only a PyTorch that is imported, about a CUDA that is initialized."""

from __future__ import annotations

import sys
from typing import Optional

__all__ = ["Levels", "device_memory", "joined"]

Levels = Optional[dict[str, int]]


def device_memory() -> Levels:
    """Bytes on the current device: in tensors, held by PyTorch, and free to the driver. None while CUDA is not initialized."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    try:
        if not torch.cuda.is_initialized():
            return None
        free, _ = torch.cuda.mem_get_info()
        return {
            "device.allocated": torch.cuda.memory_allocated(),
            "device.reserved": torch.cuda.memory_reserved(),
            "device.free": free,
        }
    except Exception:  # a PyTorch that is half imported, or a device that failed: it is the program's matter, not ours
        return None


def joined(before: Levels, after: Levels) -> dict[str, tuple[Optional[int], Optional[int]]]:
    """Before and after, by name; None where CUDA was not initialized yet."""
    names = {**(before or {}), **(after or {})}
    return {name: ((before or {}).get(name), (after or {}).get(name)) for name in names}
