"""Tensors that a weight holds beside its own bytes: the scales of weights that other libraries quantized.

They are registered nowhere: an attribute of the parameter has them (bitsandbytes' `quant_state`), or an object that the
layer keeps and that has the parameter's own bytes, too (the state of its 8-bit layers). Their layers read them with the
weight, so they go where the weight goes. PyTorch's own `.to(device)` leaves both to the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ModelError

__all__ = ["HeldTensors", "check_held"]

_DEPTH = 3
"""Objects and containers in each other that are looked into: a state holds the state of its scales."""
_WIDTH = 4096
"""Elements of a container that are looked at: tables of tokens are long and hold no weights."""
_OURS = "_weightstream"


class HeldTensors:
    """Finds them. An object that many modules share, such as a configuration, is looked into once."""

    def __init__(self) -> None:
        self._inside: dict[int, list[tuple[str, Tensor]]] = {}
        self._kept: list[Any] = []

    def of(self, module: nn.Module, name: str, parameter: Tensor) -> list[tuple[str, Tensor]]:
        """The tensors that belong to a module's parameter `name` and are registered nowhere, with how to reach them from the module."""
        found: dict[int, tuple[str, Tensor]] = {}
        for key, value in parameter.__dict__.items():
            if not key.startswith(_OURS):
                _add(found, _tensors(f"{name}.{key}", value, _DEPTH))
        storage = _storage(parameter)
        for key, value in _objects(module) if storage else ():
            inside = self._of_object(value)
            if any(_storage(tensor) == storage for _, tensor in inside):
                _add(found, [(key + path, tensor) for path, tensor in inside])
        return list(found.values())

    def _of_object(self, value: Any) -> list[tuple[str, Tensor]]:
        if id(value) not in self._inside:
            self._inside[id(value)] = list(_tensors("", value, _DEPTH))
            self._kept.append(value)  # ids stay unique only while their objects live
        return self._inside[id(value)]


def check_held(path: str, parameter: Tensor, device: torch.device) -> None:
    """Refuses a weight whose bytes its library has put into an order for another kind of device."""
    state = parameter.__dict__.get("quant_state")
    if device.type != "cpu" and getattr(state, "packing_format_for_cpu", False):
        raise ModelError(
            f"{path} was packed for the CPU by bitsandbytes when it computed there; call state_dict() on its layer, which "
            f"unpacks it, before attaching to {device}"
        )


def _objects(module: nn.Module) -> list[tuple[str, Any]]:
    """Plain objects among a module's own attributes: nothing of PyTorch, no functions, nothing that every module has."""
    return [
        (key, value) for key, value in module.__dict__.items() if not key.startswith("_") and _is_plain_object(value)
    ]


def _is_plain_object(value: Any) -> bool:
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (type, Tensor, nn.Module))
        and not callable(value)
        and not type(value).__module__.startswith("torch")
    )


def _tensors(path: str, value: Any, depth: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield path, value
    elif depth > 0 and isinstance(value, (list, tuple)):
        for number, item in enumerate(value[:_WIDTH]):
            yield from _tensors(f"{path}[{number}]", item, depth - 1)
    elif depth > 0 and isinstance(value, dict):
        for key, item in islice(value.items(), _WIDTH):
            yield from _tensors(f"{path}[{key!r}]", item, depth - 1)
    elif depth > 0 and _is_plain_object(value):
        for key, item in vars(value).items():
            yield from _tensors(f"{path}.{key}", item, depth - 1)


def _add(found: dict[int, tuple[str, Tensor]], tensors: Any) -> None:
    for path, tensor in tensors:
        found.setdefault(id(tensor), (path, tensor))


def _storage(tensor: Tensor) -> int:
    """The address of a tensor's storage; 0 for one that has none."""
    if tensor.layout != torch.strided or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return 0
    return tensor.untyped_storage()._cdata if tensor.numel() else 0
