"""What the adapters of all peers share: their common shape, block lists, and splitting a budget into whole blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

GIB = 1 << 30
MIB = 1 << 20


# --------------------------------------------------------------------------


class Attached:
    """What every ``attach_*`` returns: a callable forward plus its bookkeeping."""

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        *,
        info: dict[str, Any] | None = None,
        warmup_calls: int = 2,
        close: Callable[[], None] | None = None,
        keep: Any = None,
    ) -> None:
        self.name = name
        self._forward = forward
        self.info = dict(info or {})
        self.warmup_calls = int(warmup_calls)
        self._close = close
        self._keep = keep

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # no_grad, not inference_mode: several peers assign .data, make Parameters or
        # read version counters inside forward.
        with torch.inference_mode(False), torch.no_grad():
            return self._forward(*args, **kwargs)

    forward = __call__

    def close(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()
        self._keep = None

    def __repr__(self) -> str:
        return f"Attached({self.name!r}, {self.info})"


def plain_mode(attach):
    """Run an adapter outside inference mode, whatever the caller is in: tensors made
    under inference mode have no version counter and cannot be assigned freely."""

    @functools.wraps(attach)
    def wrapper(*args, **kwargs):
        with torch.inference_mode(False), torch.no_grad():
            return attach(*args, **kwargs)

    return wrapper


def as_device(device: Any) -> torch.device:
    dev = torch.device(device)
    if dev.type == "cuda" and dev.index is None:
        dev = torch.device("cuda", torch.cuda.current_device())
    return dev


def tensor_bytes(tensors: Any) -> int:
    seen: set[int] = set()
    total = 0
    for t in tensors:
        if id(t) not in seen:
            seen.add(id(t))
            total += t.numel() * t.element_size()
    return total


def module_bytes(module: nn.Module) -> int:
    return tensor_bytes([*module.parameters(), *module.buffers()])


def owner_of(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, leaf = path.rpartition(".")
    return (model.get_submodule(parent) if parent else model), leaf


def get_blocks(model: nn.Module, blocks_attr: str = "blocks") -> list[nn.Module]:
    owner, leaf = owner_of(model, blocks_attr)
    return list(getattr(owner, leaf))


def plan(
    model: nn.Module,
    resident_bytes: int | None,
    *,
    blocks_attr: str = "blocks",
    staging_blocks: int = 2,
) -> dict[str, int]:
    """How many blocks may stay on the GPU, given the total weight budget."""
    blocks = get_blocks(model, blocks_attr)
    block = max(module_bytes(b) for b in blocks)
    other = module_bytes(model) - sum(module_bytes(b) for b in blocks)
    if resident_bytes is None:
        slots = staging_blocks
    else:
        slots = max(0, (int(resident_bytes) - max(other, 0)) // max(block, 1))
    n = len(blocks)
    if slots >= n:
        resident = n
    else:
        resident = max(0, slots - staging_blocks)
    return {
        "blocks": n,
        "block_bytes": block,
        "other_bytes": other,
        "slots": min(slots, n),
        "resident_blocks": resident,
    }


def spread(n: int, k: int) -> list[int]:
    """k of n indices, evenly spaced, so that copies have compute to hide behind."""
    if k <= 0:
        return []
    if k >= n:
        return list(range(n))
    return sorted({int((i + 0.5) * n / k) for i in range(k)})


def move_outside_blocks(model: nn.Module, device: torch.device, blocks_attr: str) -> None:
    inside = {id(t) for b in get_blocks(model, blocks_attr) for t in [*b.parameters(), *b.buffers()]}
    for module in model.modules():
        for p in list(module._parameters.values()):
            if p is not None and id(p) not in inside and p.device != device:
                p.data = p.data.to(device)
        for name, b in list(module._buffers.items()):
            if b is not None and id(b) not in inside and b.device != device:
                module._buffers[name] = b.to(device)


def split_blocks(model: nn.Module, device: torch.device, n_resident: int, blocks_attr: str) -> tuple[str, list[int]]:
    """Emulate residency for a library that has none.

    The block list becomes a plain Python list (so ``for b in self.blocks`` still
    works), the resident blocks are put on the device and hidden from the module
    tree, and only the streamed ones stay registered, as ``_streamed_blocks``.
    Returns the dotted name of that list and the resident indices.
    """
    owner, leaf = owner_of(model, blocks_attr)
    blocks = list(getattr(owner, leaf))
    keep = set(spread(len(blocks), n_resident))
    for i in keep:
        blocks[i].to(device)
    del owner._modules[leaf]
    object.__setattr__(owner, leaf, blocks)
    owner._streamed_blocks = nn.ModuleList([b for i, b in enumerate(blocks) if i not in keep])
    prefix = blocks_attr.rpartition(".")[0]
    return (f"{prefix}." if prefix else "") + "_streamed_blocks", sorted(keep)


def prepare(model: nn.Module) -> nn.Module:
    return model.eval().requires_grad_(False)
