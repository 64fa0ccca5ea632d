"""Parameters whose bytes come and go: reading one outside its turn serves the host's bytes, writing one is refused.

A managed parameter's address is always valid, but between its unit's turns the memory behind it holds another unit's
weights. The class below makes the ways in which people look at a parameter honest. It costs an operation nothing
beyond what any subclass of `nn.Parameter` costs: there is no `__torch_function__`, so functions such as
`torch.sum(p)` or `p + 1` outside a forward are *not* seen. Use `with attachment.resident(module):` for those.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Callable

import torch
from torch import nn

from .errors import StateError

__all__ = ["ManagedParameter", "ParameterGuard", "managed_class"]

_READS = (
    "cpu", "cuda", "to", "type", "type_as", "clone", "numpy", "tolist", "item", "__array__",
    "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool",
    "__float__", "__int__", "__bool__", "__complex__", "__index__", "__format__",
)  # fmt: skip
_IN_PLACE_OPERATORS = (
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
)  # fmt: skip
_HARMLESS = {"requires_grad_", "detach_", "rename_"}


@dataclass(frozen=True, eq=False)
class ParameterGuard:
    """What a managed parameter knows about itself."""

    name: str
    """Its dotted name in the model."""
    requires_grad: bool
    """Whether it required grad before the model was attached."""
    host: torch.Tensor
    """Its bytes in host memory, with its dtype, shape and strides."""
    present: Callable[[], bool]
    """Whether the memory behind it holds its bytes now."""

    def copy(self) -> torch.Tensor:
        """A tensor of its own with the parameter's bytes, so that a reader cannot change what is streamed."""
        with torch.inference_mode(False), torch.no_grad():
            return self.host.clone(memory_format=torch.preserve_format)


class ManagedParameter(nn.Parameter):
    """A parameter of an attached model: `attach` makes this the class of the model's parameters, `detach` undoes it.

    Methods that read (`cpu`, `numpy`, `clone`, `to`, `item`, `deepcopy`, pickling, printing, …) use the device's bytes
    during the parameter's turn and the host's otherwise: the same bits either way. Methods that write raise
    `StateError`.
    """

    # PyTorch knows Parameter itself by its type alone, and asks any subclass for __torch_function__ and what it is an
    # instance of: 0.4 us for each one that an operator takes. To name the disabled function here does not change that.
    _weightstream: ParameterGuard

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        """Refuses True: a streamed weight cannot be trained."""
        if requires_grad:
            name = self._weightstream.name
            raise StateError(f"parameter {name} is managed and cannot require grad; detach() the model to train it")
        return super().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            guard = self._weightstream
            memo[id(self)] = nn.Parameter(guard.copy(), requires_grad=guard.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        guard = self._weightstream
        return nn.Parameter(guard.host, requires_grad=guard.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        guard = self._weightstream
        return f"ManagedParameter {guard.name} on {self.device}, host bytes:\n{guard.host!r}"


@cache
def managed_class(cls: type[nn.Parameter]) -> type[ManagedParameter]:
    """The guarded class for parameters of class `cls`, which keep what that class adds."""
    if cls is nn.Parameter:
        return ManagedParameter
    return type(f"Managed{cls.__name__}", (ManagedParameter, cls), {"__doc__": ManagedParameter.__doc__})


def _reader(name: str) -> Callable[..., Any]:
    def read(self: ManagedParameter, *args: Any, **kwargs: Any) -> Any:
        guard = self._weightstream
        if guard.present():
            return getattr(super(ManagedParameter, self), name)(*args, **kwargs)
        copy = guard.copy()
        return getattr(copy if self.device.type == "cpu" else copy.to(self.device), name)(*args, **kwargs)

    read.__name__, read.__doc__ = name, getattr(torch.Tensor, name).__doc__
    return read


def _writer(name: str) -> Callable[..., Any]:
    def write(self: ManagedParameter, *args: Any, **kwargs: Any) -> Any:
        raise StateError(
            f"{name} on the managed parameter {self._weightstream.name}: the write would be lost at its next copy; "
            f"detach() the model, change it and attach again"
        )

    write.__name__ = name
    return write


def _fill_class() -> None:
    for name in _READS:
        if hasattr(torch.Tensor, name):
            setattr(ManagedParameter, name, _reader(name))
    in_place = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]
    for name in (*in_place, *_IN_PLACE_OPERATORS):
        if name not in _HARMLESS and hasattr(torch.Tensor, name):
            setattr(ManagedParameter, name, _writer(name))


_fill_class()
