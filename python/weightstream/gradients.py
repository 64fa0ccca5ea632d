"""Refuses what would give silently wrong gradients: tensors that require grad at the edge of a block.

Only looked for while grad is enabled. A tensor is found wherever a caller would look for it: in containers, mappings,
dataclasses, nodes registered with PyTorch's pytree, and the attributes of plain objects such as caches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from .errors import ForwardError

__all__ = ["refuse_grad"]

_SEQUENCES = (list, tuple, Set, deque)
_PLAIN = frozenset(
    (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, slice, range)
)
"""What holds no tensor."""
_CLOSED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, nn.Module, torch.Generator)
"""What is not opened: a module's own parameters are not what it passes on."""
_DEPTH = 8
"""Levels that are looked into; a tensor that flows from block to block does not hide deeper."""


def refuse_grad(name: str, what: str, values: Iterable[Any]) -> None:
    """Raises ForwardError if a tensor in `values` requires grad: its gradient would silently be wrong."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                _refuse(name, what)
        elif type(value) not in _PLAIN and _requires_grad(value, _DEPTH, {}):
            _refuse(name, what)


def _refuse(name: str, what: str) -> None:
    raise ForwardError(
        f"an {what} of {name} requires grad, and gradients through streamed weights would be wrong; "
        f"run under torch.no_grad() or torch.inference_mode()"
    )


def _requires_grad(value: Any, depth: int, seen: dict[int, Any]) -> bool:
    """Whether a tensor in or at `value` requires grad. `seen` keeps what was opened alive, so that ids stay unique."""
    if type(value) in _PLAIN:
        return False
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if depth == 0 or isinstance(value, _CLOSED) or id(value) in seen:
        return False
    seen[id(value)] = value
    return any(_requires_grad(part, depth - 1, seen) for part in _parts(value))


def _parts(value: Any) -> Iterator[Any]:
    """What a value holds."""
    node = _pytree.SUPPORTED_NODES.get(type(value))
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, _SEQUENCES):
        yield from value
    elif node is not None:
        yield from node.flatten_fn(value)[0]
    yield from getattr(value, "__dict__", {}).values()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                yield getattr(value, _mangled(cls, slot), None)


def _mangled(cls: type, slot: str) -> str:
    """The name under which a class keeps a slot that begins with two underscores."""
    private = slot.startswith("__") and not slot.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{slot}" if private else slot
