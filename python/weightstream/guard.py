"""Parameters whose bytes come and go: reading one outside its turn serves the host's bytes, writing one is refused.

A managed parameter's address is always valid, but between its unit's turns the memory behind it holds another unit's
weights. The class below makes a parameter's own methods and views honest. It costs an operation that is given the
parameter nothing beyond what any subclass of `nn.Parameter` costs: there is no `__torch_function__`, and the binary
operators are PyTorch's, so `torch.sum(p)`, `torch.tensor(p)`, `other.copy_(p)` or `p + 1` outside a forward are *not*
seen. Use `with attachment.resident(module):` for those.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from threading import get_ident
from typing import Any, Callable

import torch
from torch import nn

from ._native import check_mapped
from .errors import StateError

__all__ = ["ManagedParameter", "ParameterGuard", "graph_threads", "managed_class"]

_READING_OPERATORS = (
    "__array__", "__dlpack__", "__float__", "__int__", "__bool__", "__complex__", "__index__", "__format__",
    "__getitem__", "__iter__", "__reversed__", "__contains__", "__neg__", "__pos__", "__abs__", "__invert__",
)  # fmt: skip
"""Binary operators are left alone: blocks use them on their weights, and a Python method there costs."""
_READING_PROPERTIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "data": torch.detach,
    "T": lambda tensor: torch.permute(tensor, tuple(range(tensor.dim()))[::-1]),
    "mT": lambda tensor: torch.transpose(tensor, -2, -1),
    "H": torch.adjoint,
    "mH": torch.adjoint,
    "real": torch.real,
    "imag": torch.imag,
}
"""With what the compiler traces in their place: it finds the properties below again in PyTorch's own."""
_UNREAD_BEGINNINGS = ("_", "is_", "has_", "new", "q_")
_UNREAD = frozenset(
    "dim dim_order ndimension nelement numel size stride storage_offset element_size get_device sparse_dim dense_dim "
    "data_ptr storage untyped_storage storage_type register_hook register_post_accumulate_grad_hook retain_grad "
    "backward align_to align_as refine_names resize resize_as".split()
)
"""Methods that read no bytes, or are about the storage and not about its bytes."""
_IN_PLACE_OPERATORS = (
    "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__",
    "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__",
)  # fmt: skip
_HARMLESS = {"requires_grad_", "detach_", "rename_"}


graph_threads: set[int] = set()
"""Threads in which a graph of a whole model runs. PyTorch asks for the `data` of what operators are given in a graph's first
run, for its type: a copy of every weight, on the device, would be made for that."""


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

    def check(self) -> None:
        """Raises CheckpointError if the host bytes lie in a file that was changed: reading them could end the process."""
        host = self.host
        check_mapped([(self.name, host.untyped_storage().data_ptr(), host.untyped_storage().nbytes())])

    def copy(self) -> torch.Tensor:
        """A tensor of its own with the parameter's bytes, so that a reader cannot change what is streamed."""
        self.check()
        with torch.inference_mode(False), torch.no_grad():
            return self.host.clone(memory_format=torch.preserve_format)


class ManagedParameter(nn.Parameter):
    """A parameter of an attached model: `attach` makes this the class of the model's parameters, `detach` undoes it.

    Methods that read, or make views that can be read (`cpu`, `clone`, `sum`, `detach`, `data`, `view`, `p[0]`,
    `deepcopy`, pickling, printing, …) use the device's bytes during the parameter's turn and a copy of the host's
    otherwise: the same bits either way, on the same device. Methods that write raise `StateError`.
    """

    # PyTorch knows Parameter itself by its type alone, and asks any subclass for __torch_function__ and what it is an
    # instance of: 0.4 us for each one that an operator takes. To name the disabled function here does not change that.
    _weightstream: ParameterGuard

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        """Refuses True: a streamed weight cannot be trained. PEFT asks for it whenever an adapter is chosen or switched on
        again, which is no wish to train: its adapters' weights stay as they are."""
        name = self._weightstream.name
        if requires_grad and any(part.startswith("lora_") for part in name.split(".")):
            return self
        if requires_grad:
            raise StateError(f"parameter {name} is managed and cannot require grad; detach() the model to train it")
        return super().requires_grad_(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            guard = self._weightstream
            memo[id(self)] = nn.Parameter(guard.copy(), requires_grad=guard.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: int) -> Any:
        guard = self._weightstream
        guard.check()
        return nn.Parameter(guard.host, requires_grad=guard.requires_grad).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        guard = self._weightstream
        guard.check()
        return f"ManagedParameter {guard.name} on {self.device}, host bytes:\n{guard.host!r}"


@cache
def managed_class(cls: type[nn.Parameter]) -> type[ManagedParameter]:
    """The guarded class for parameters of class `cls`, which keep what that class adds."""
    if cls is nn.Parameter:
        return ManagedParameter
    return type(f"Managed{cls.__name__}", (ManagedParameter, cls), {"__doc__": ManagedParameter.__doc__})


def _elsewhere(parameter: ManagedParameter) -> torch.Tensor | None:
    """The tensor to read in the place of `parameter`, or None if the memory behind it holds its bytes."""
    guard = parameter._weightstream
    if guard.present():
        return None
    copy = guard.copy()
    return copy if parameter.device.type == "cpu" else copy.to(parameter.device)


def _reader(name: str) -> Callable[..., Any]:
    def read(self: ManagedParameter, *args: Any, **kwargs: Any) -> Any:
        # Compiled code runs in its block's turn, and must not depend on whose turn it was when it was traced.
        copy = None if torch.compiler.is_compiling() else _elsewhere(self)
        return getattr(super(ManagedParameter, self) if copy is None else copy, name)(*args, **kwargs)

    read.__name__, read.__doc__ = name, getattr(torch.Tensor, name).__doc__
    return read


def _reading_property(name: str, traced: Callable[..., Any], write: Callable[..., Any] | None) -> property:
    plain = getattr(torch.Tensor, name).__get__

    def read(self: ManagedParameter) -> Any:
        if torch.compiler.is_compiling():
            return traced(self)
        if name == "data" and get_ident() in graph_threads:
            return plain(self)
        copy = _elsewhere(self)
        return plain(self if copy is None else copy)

    return property(read, write, doc=getattr(torch.Tensor, name).__doc__)


def _writer(name: str) -> Callable[..., Any]:
    def write(self: ManagedParameter, *args: Any, **kwargs: Any) -> Any:
        raise StateError(
            f"{name} on the managed parameter {self._weightstream.name}: the write would be lost at its next copy; "
            f"detach() the model, change it and attach again"
        )

    write.__name__ = name
    return write


_refuse_data = _writer("data")


def _write_data(self: ManagedParameter, value: Any) -> None:
    """Refuses other data. Layers of bitsandbytes set what is there already after each forward."""
    if (
        isinstance(value, torch.Tensor)
        and value.data_ptr() == self.data_ptr()
        and (value.dtype, value.shape, value.stride()) == (self.dtype, self.shape, self.stride())
        and value.device == self.device
    ):
        return
    _refuse_data(self)


def _fill_class() -> None:
    names = dir(torch.Tensor)
    for name in (*(name for name in names if not name.startswith(_UNREAD_BEGINNINGS)), "is_nonzero"):
        if name in _UNREAD or not callable(getattr(torch.Tensor, name)):
            continue
        if name.endswith("_"):
            if name not in _HARMLESS:
                setattr(ManagedParameter, name, _writer(name))
        else:
            setattr(ManagedParameter, name, _reader(name))
    for name in filter(names.__contains__, _READING_OPERATORS):
        setattr(ManagedParameter, name, _reader(name))
    for name in filter(names.__contains__, _IN_PLACE_OPERATORS):
        setattr(ManagedParameter, name, _writer(name))
    for name, traced in _READING_PROPERTIES.items():
        setattr(ManagedParameter, name, _reading_property(name, traced, _write_data if name == "data" else None))


_fill_class()
