"""Tensor subclasses that are made of inner tensors (quantized weights): opened for streaming, put together again.

A subclass may repack itself when it goes to a device, so it is moved by its own `.to(device)`, one at a time, and the
inner tensors of that form are what streams. Where the move changes no byte, the original's own inner tensors are used
and nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .errors import ModelError
from .spans import InnerPath, inner_tensors, is_wrapper

__all__ = ["DeviceForms", "Wrapper"]

_Recipe = tuple[type, tuple[tuple[str, Any], ...], Any, torch.Size, tuple[int, ...]]


@dataclass(eq=False)
class Wrapper:
    """A registered tensor that is made of inner tensors, in the form it has on the device."""

    original: Tensor | None
    """The registered tensor itself, kept if its own inner tensors are streamed: detach puts it back."""
    cls: type
    """Its class, for messages."""
    recipe: _Recipe
    """How it is put together."""
    is_parameter: bool
    """Whether it is a parameter."""
    requires_grad: bool
    """Whether it required grad."""

    def build(self, leaves: Mapping[InnerPath, Tensor]) -> Tensor:
        """The wrapper made of other inner tensors of the same shapes."""
        with torch.no_grad():
            tensor = _build(self.recipe, (), leaves)
            return nn.Parameter(tensor, requires_grad=False) if self.is_parameter else tensor

    def on_host(self, leaves: Mapping[InnerPath, Tensor], device: torch.device) -> Tensor:
        """The plain CPU form, from the host bytes of the device form."""
        if self.original is not None:
            return self.original
        # Only the class itself can undo its repacking, and only from where it did it.
        moved = _build(self.recipe, (), {path: leaf.to(device) for path, leaf in leaves.items()}).to("cpu")
        return nn.Parameter(moved, requires_grad=self.requires_grad) if self.is_parameter else moved


class DeviceForms:
    """Opens a model's tensors for one device; remembers the wrappers it met."""

    def __init__(self, device: torch.device) -> None:
        self.wrappers: dict[int, Wrapper] = {}
        """By the id of the registered tensor."""
        self._leaves: dict[int, list[tuple[InnerPath, Tensor]]] = {}
        self._kept: list[Tensor] = []
        self._device = device

    def flatten(self, tensor: Tensor) -> list[tuple[InnerPath, Tensor]]:
        """The plain tensors behind `tensor` in its device form, held on the CPU. Same tensors for the same argument."""
        if not is_wrapper(tensor):
            return [((), tensor)]
        if id(tensor) not in self._leaves:
            self._leaves[id(tensor)] = self._open(tensor)
            self._kept.append(tensor)  # ids stay unique only while their tensors live
        return self._leaves[id(tensor)]

    def forget(self) -> None:
        """Lets go of the tensors it opened, so that their old storages can die."""
        self._leaves.clear()
        self._kept.clear()

    def _open(self, tensor: Tensor) -> list[tuple[InnerPath, Tensor]]:
        own = inner_tensors(tensor)
        if any(leaf.device.type != "cpu" for _, leaf in own):
            return own
        try:
            with torch.no_grad():
                moved = tensor if self._device.type == "cpu" else tensor.to(self._device)
            leaves = [(path, leaf.cpu()) for path, leaf in inner_tensors(moved)]
            recipe = _recipe(moved)
        except Exception as error:
            raise ModelError(f"a {type(tensor).__name__} cannot be moved to {self._device}: {error}") from error
        unchanged = moved is tensor or _same(own, leaves)
        self.wrappers[id(tensor)] = Wrapper(
            original=tensor if unchanged else None,
            cls=type(tensor),
            recipe=recipe,
            is_parameter=isinstance(tensor, nn.Parameter),
            requires_grad=tensor.requires_grad,
        )
        return own if unchanged else leaves


def _recipe(tensor: Tensor) -> _Recipe:
    names, context = tensor.__tensor_flatten__()
    parts = [(name, getattr(tensor, name)) for name in names]
    inner = tuple((name, _recipe(part) if is_wrapper(part) else None) for name, part in parts)
    return type(tensor), inner, context, tensor.shape, tensor.stride()


def _build(recipe: _Recipe, path: InnerPath, leaves: Mapping[InnerPath, Tensor]) -> Tensor:
    cls, inner, context, shape, stride = recipe
    parts = {
        name: leaves[(*path, name)] if part is None else _build(part, (*path, name), leaves) for name, part in inner
    }
    return cls.__tensor_unflatten__(parts, context, shape, stride)


def _same(own: list[tuple[InnerPath, Tensor]], moved: list[tuple[InnerPath, Tensor]]) -> bool:
    """Whether the device form has the same bytes in the same places as the CPU form."""
    return len(own) == len(moved) and all(
        path == other_path
        and leaf.dtype == other.dtype
        and leaf.shape == other.shape
        and leaf.stride() == other.stride()
        and torch.equal(_bytes(leaf), _bytes(other))
        for (path, leaf), (other_path, other) in zip(own, moved)
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
